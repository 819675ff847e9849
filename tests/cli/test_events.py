"""`--events FILE` of the commands that run a model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
COMMANDS = {"run": ("run", "hello"), "chat": ("chat",)}
FAKE = ("--backend", "fake", "--max-tokens", "12")
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_has_every_step_and_stdout_only_the_answer(
    ferrum: Run, command: str, tmp_path: Path
) -> None:
    plain = ferrum(*COMMANDS[command], *FAKE, stdin="hello\n")
    done = ferrum(*COMMANDS[command], *FAKE, "--events", "trace", stdin="hello\n")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    events = [json.loads(line)["event"] for line in (tmp_path / "trace").read_text().splitlines()]
    others = [event for event in events if event != "step"]
    assert others == ["queued", "admitted", "first_token", "finished"]
    assert len(events) - len(others) == 12


@needs_full_disk
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_a_note_and_no_failure(ferrum: Run, command: str) -> None:
    done = ferrum(*COMMANDS[command], *FAKE, "--events", "/dev/full", stdin="hello\n")
    assert (done.returncode, len(done.stdout)) == (0, 13)
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert len([note for note in notes if "No space left" in note]) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_one_line(refused: Refused, command: str) -> None:
    line = refused(*COMMANDS[command], *FAKE, "--events", "missing/trace", code=1, stdin="hello\n")
    assert "'missing/trace'" in line
    assert "No such file or directory" in line
