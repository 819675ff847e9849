"""Sessions of a chat without a screen: what is kept, resumed, deleted; and the settings file."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FAKE = ("chat", "--backend", "fake", "--max-tokens", "10")


def sessions() -> list[tuple[int, str, int]]:
    with closing(Store()) as store:
        return [(row.id, row.title, row.messages) for row in store.list()]


def typed(text: str, *args: str, code: int = 0) -> tuple[str, str]:
    """What a chat that reads a terminal says on stdout and stderr."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ferrum_mlx", *FAKE, *args]
    os.write(master, (text + "\x04").encode())
    done = subprocess.run(command, stdin=slave, capture_output=True, text=True, timeout=120, check=False)
    os.close(slave)
    os.close(master)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_a_pipe_keeps_nothing(ferrum: Run) -> None:
    ferrum(*FAKE, stdin="hi\n")
    assert not Path(os.environ["FERRUM_DATA"]).exists()


def test_a_terminal_keeps_and_resumes() -> None:
    said, _ = typed("first words\n", "--temperature", "0")
    assert sessions() == [(1, "first words", 2)]
    behind, told = typed("more\n", "--resume", "--temperature", "0")
    assert f"fake: {said.strip()}" in told
    assert sessions() == [(1, "first words", 4)]
    both, _ = typed("first words\nmore\n", "--temperature", "0")
    assert both == said + behind


def test_a_prompt_of_which_nothing_came_is_answered_after_a_resume(ferrum: Run) -> None:
    conversation = Conversation()
    conversation.leaf = conversation.add("user", "hi", parent=None).id
    conversation.leaf = conversation.add("assistant", parent=conversation.leaf).id
    with closing(Store()) as store:
        store.keep(conversation)
    done = ferrum(*FAKE, "--resume", "1", stdin="/regen\n")
    assert "this prompt has no answer yet: /regen answers it" in done.stderr
    with closing(Store()) as store:
        kept = store.load(1)
    assert [message.text for message in kept.messages.values()] == ["hi", done.stdout.removesuffix("\n")]


def test_resume_on_a_pipe_by_number(ferrum: Run, refused: Refused) -> None:
    assert "no session to go on with" in ferrum(*FAKE, "--resume", stdin="hi\n").stderr
    ferrum(
        *FAKE, "--resume", "1", stdin="/new\nother\n/sessions oth\n/resume 1\n/rename Mine\n/resume\nagain\n"
    )
    assert sessions() == [(2, "other", 4), (1, "Mine", 2)]
    assert "session 7 is not there" in refused(*FAKE, "--resume", "7", code=2)


def test_sessions_are_found_and_deleted(ferrum: Run) -> None:
    done = ferrum(
        *FAKE, "--resume", stdin="apples\n/new\npears\n/sessions APPLE\n/delete 1\n/delete\n/sessions\n"
    )
    listed = [line for line in done.stderr.splitlines() if "messages" in line and "apples" in line]
    assert len(listed) == 1
    assert listed[0].startswith("1  ")
    assert "no sessions yet" in done.stderr
    assert sessions() == []


def test_a_failed_prompt_leaves_nothing_behind(ferrum: Run) -> None:
    ferrum(*FAKE, "--resume", stdin="x" * 5000 + "\n")
    assert sessions() == []
    ferrum(*FAKE, "--resume", "--max-model-len", "32", stdin="hi\n" + "x" * 40 + "\n")
    assert [count for *_, count in sessions()] == [2]


def test_a_terminal_is_offered_a_new_conversation() -> None:
    said, told = typed(f"{'x' * 20}\n" * 3 + "/new\nx\n", "--max-model-len", "64", code=2)
    assert "the conversation is full: /new begins a new one" in told
    assert len(said.splitlines()) == 3


def test_a_file_that_cannot_be_used_costs_the_keeping_alone(ferrum: Run, refused: Refused) -> None:
    folder = Path(os.environ["FERRUM_DATA"])
    folder.mkdir()
    (folder / "sessions.db").write_bytes(b"damaged " * 1000)
    said, told = typed("hi\n")
    assert len(said.splitlines()) == 1
    assert "this conversation is not kept: cannot use the sessions in" in told
    assert "move the file away" in refused(*FAKE, "--resume", code=1)


def test_settings_hold_on_a_terminal_and_not_on_a_pipe(ferrum: Run) -> None:
    file = Path(os.environ["FERRUM_CONFIG"])
    file.parent.mkdir()
    file.write_text('system = "be kind"\nthme = 1\n[sampling]\nmin_tokens = 3\nmax_tokens = 3\n')
    _, told = typed("/set\n/system\n/quit\n")
    assert "note: " in told
    assert "'thme' is no setting" in told
    assert "max_tokens=10 min_tokens=3" in told  # the option goes before
    assert "system message: be kind" in told
    piped = ferrum(*FAKE, stdin="/set\n/system\n").stderr
    assert "min_tokens=0" in piped
    assert "system message: none" in piped
    assert "thme" not in piped


@pytest.mark.parametrize("value", ["x", "1.5"])
def test_resume_takes_a_number(value: str, refused: Refused) -> None:
    assert value in refused("chat", f"--resume={value}", code=2)
