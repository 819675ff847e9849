"""Chat on a pipe: one prompt a line, answers on stdout. The screen has tests of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FAKE = ("chat", "--backend", "fake", "--max-tokens", "10")


def test_a_line_is_a_prompt_and_answers_go_to_stdout(ferrum: Run) -> None:
    done = ferrum(*FAKE, stdin="one\n\ntwo\n")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert len(first) == len(second) == 10
    assert "\x1b" not in done.stdout + done.stderr
    assert "tok/s" in done.stderr
    assert ferrum(*FAKE, "--plain", stdin="one\n").stdout == first + "\n"


def test_history_is_kept_until_a_new_conversation(ferrum: Run) -> None:
    alone = ferrum(*FAKE, stdin="two\n").stdout
    behind = ferrum(*FAKE, stdin="one\ntwo\n").stdout.splitlines(keepends=True)[1]
    renewed = ferrum(*FAKE, stdin="one\n/new\ntwo\n").stdout.splitlines(keepends=True)[1]
    assert behind != alone
    assert renewed == alone


def test_commands(ferrum: Run) -> None:
    done = ferrum(*FAKE, stdin="/help\n/quit\nnever\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert "/new" in done.stderr


def test_system_message_counts(ferrum: Run) -> None:
    assert ferrum(*FAKE, "--system", "be kind", stdin="hi\n").stdout != ferrum(*FAKE, stdin="hi\n").stdout


def test_last_line_needs_no_newline(ferrum: Run) -> None:
    assert ferrum(*FAKE, stdin="hi").stdout == ferrum(*FAKE, stdin="hi\n").stdout


def test_failed_prompt_is_told_and_the_next_one_answered(ferrum: Run) -> None:
    done = ferrum(*FAKE, stdin="x" * 5000 + "\nfine\n")
    assert done.returncode == 2
    assert done.stdout == ferrum(*FAKE, stdin="fine\n").stdout
    assert "ferrum-mlx: the prompt has 5001 tokens" in done.stderr


def test_unknown_model_is_one_line(refused: Refused) -> None:
    line = refused("chat", "--offline", "no-such-model", code=1)
    assert "no-such-model" in line


def test_two_models_are_refused(refused: Refused) -> None:
    line = refused("chat", "one", "--model", "two", code=2)
    assert "'one'" in line
    assert "'two'" in line
