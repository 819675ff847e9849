"""What was found in the prefix cache, where a user looks for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = ("--backend", "fake", "--max-tokens", "10")
SYSTEM = "x" * 100  # of the fake model, a token each behind one that begins the message


def test_prompts_of_one_run_share_their_system_message(ferrum: Run) -> None:
    done = ferrum("run", *FAKE, "--json", "--system", SYSTEM, "one", "two")
    answers = json.loads(done.stdout)
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, 96]
    said = ferrum("run", *FAKE, "--system", SYSTEM, "one", "two").stderr
    assert "prompt 105 tokens, 0 cached" in said
    assert "prompt 105 tokens, 96 cached" in said


def test_answers_to_one_prompt_count_it_once(ferrum: Run) -> None:
    args = (*FAKE, "-n", "3", "--temperature", "1", "--system", SYSTEM, "one")
    usage = json.loads(ferrum("run", "--json", *args).stdout)["usage"]
    assert (usage["prompt_tokens"], usage["cached_tokens"]) == (105, 0)
    said = ferrum("run", *args).stderr
    assert [said.count(f"{count} cached") for count in (" 0", " 96")] == [1, 2]


def test_a_chat_on_a_pipe_says_what_each_turn_found(ferrum: Run) -> None:
    said = ferrum("chat", *FAKE, stdin=f"{SYSTEM}\nmore\n/new\n{SYSTEM}\n").stderr
    cached = [int(part.split(" cached")[0].split()[-1]) for part in said.splitlines() if " cached" in part]
    assert cached == [0, 96, 96]
