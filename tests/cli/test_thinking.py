"""Thinking apart from the answer; the fake model thinks behind a prompt that opens the tag."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import pytest

from ferrum_mlx.chat.store import Store

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FAKE = ("run", "--backend", "fake", "--max-tokens", "12")
THINKS = "ponder <think>"


def test_run_prints_the_answer_alone(ferrum: Run) -> None:
    done = ferrum(*FAKE, THINKS)
    assert (done.returncode, done.stdout) == (0, "\n")
    thinking = json.loads(ferrum(*FAKE, "--json", THINKS).stdout)["thinking"]
    assert thinking not in done.stderr  # which is no terminal here


def test_json_has_both(ferrum: Run) -> None:
    thought = json.loads(ferrum(*FAKE, "--json", THINKS).stdout)
    assert (thought["text"], thought["thinking"].encode()) == ("", bytes(thought["token_ids"]))
    said = json.loads(ferrum(*FAKE, "--json", "hello").stdout)
    assert (said["text"].encode(), said["thinking"]) == (bytes(said["token_ids"]), "")
    raw = json.loads(ferrum(*FAKE, "--json", "--raw", THINKS).stdout)
    assert (raw["text"].encode(), raw["thinking"]) == (bytes(raw["token_ids"]), "")


def test_a_terminal_shows_thinking_dimmed(ferrum: Run) -> None:
    thinking = json.loads(ferrum(*FAKE, "--json", THINKS).stdout)["thinking"]
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ferrum_mlx", *FAKE, THINKS]
    done = subprocess.run(command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, check=True, timeout=120)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:  # all has been read
        pass
    os.close(master)
    letters = shown.decode().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert b"\x1b[2m" in shown
    assert thinking in letters
    assert done.stdout == b"\n"


def test_chat_keeps_thinking_out_of_the_history(ferrum: Run) -> None:
    chat = ("chat", "--backend", "fake", "--max-tokens", "12")
    done = ferrum(*chat, stdin=f"{THINKS}\ntwo\n")
    assert done.stdout.splitlines()[0] == ""
    prompt = len(THINKS) + len("two") + 3  # a begin-of-turn each, and an answer without text
    assert f"prompt {prompt} tokens" in done.stderr


def test_chat_keeps_how_long_it_thought(ferrum: Run) -> None:
    ferrum("chat", "--backend", "fake", "--max-tokens", "12", "--resume", stdin=f"{THINKS}\nplain\n")
    with closing(Store()) as store:
        answers = [each for each in store.load(1).messages.values() if each.role == "assistant"]
    assert [bool(answer.thinking) for answer in answers] == [True, False]
    assert [0 < answer.thought_s < 60 for answer in answers] == [True, False]


@pytest.mark.parametrize("flag", ["--thinking", "--no-thinking"])
def test_the_switch_reaches_the_template(flag: str, ferrum: Run) -> None:
    plain, switched = (
        json.loads(ferrum(*FAKE, "--json", *args, "hello").stdout)["usage"]["prompt_tokens"]
        for args in ((), (flag,))
    )
    setting = json.dumps({"thinking": flag == "--thinking"})
    assert switched - plain == len(setting)
    chat = ferrum("chat", "--backend", "fake", "--max-tokens", "2", flag, stdin="hello\n")
    assert f"prompt {switched} tokens" in chat.stderr


def test_the_switch_needs_a_template(refused: Refused) -> None:
    assert "--thinking needs the chat template" in refused(*FAKE, "--raw", "--no-thinking", "hello", code=2)
