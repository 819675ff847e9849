"""The real program in a real pseudo-terminal, on the fake backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ferrum_tui.pseudo_terminal import PseudoTerminal

COMMAND = [sys.executable, "-m", "ferrum_mlx", "chat", "--backend", "fake"]


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    with PseudoTerminal(COMMAND) as terminal:
        yield terminal


@pytest.fixture
def plain() -> Iterator[PseudoTerminal]:
    endless = ("--max-model-len", "200000", "--max-tokens", "150000")  # or it ends before Ctrl+C does it
    with PseudoTerminal([*COMMAND, "--plain", *endless]) as plain:
        yield plain


def test_a_conversation_and_ctrl_d(terminal: PseudoTerminal) -> None:
    terminal.wait_for("ready")
    terminal.send("hello\r")
    terminal.wait_for("hello")
    terminal.wait_for("TTFT")
    terminal.send("\x04")
    assert terminal.end() == 0
    assert terminal.output.count("\x1b[?1049h") == terminal.output.count("\x1b[?1049l") == 1


def test_ctrl_c_twice_quits(terminal: PseudoTerminal) -> None:
    terminal.wait_for("ready")
    terminal.send("\x03")
    terminal.wait_for("again quits")
    terminal.send("\x03")
    assert terminal.end() == 0


def test_what_is_typed_at_once_is_obeyed_in_order(terminal: PseudoTerminal) -> None:
    terminal.wait_for("ready")
    terminal.send("first\nline\rdraft")
    terminal.wait_for("draft")
    terminal.wait_for("TTFT")
    terminal.send("\x11")
    assert terminal.end() == 0


def test_killed_engine_is_replaced_under_the_screen(terminal: PseudoTerminal) -> None:
    terminal.wait_for("ready")
    (child,) = children(terminal.process.pid)
    os.kill(child, signal.SIGKILL)
    terminal.wait_for("killed by signal 9")
    terminal.wait_for("ready")
    terminal.send("hello\r")
    terminal.wait_for("TTFT")
    terminal.send("\x04")
    assert terminal.end() == 0


DEAF = "import os, sys, signal as s; s.signal(s.SIGHUP, s.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


def test_a_terminal_that_goes_away_ends_the_chat_and_its_engine() -> None:
    """Also where nobody passes the hang-up on, as a program in between may do."""
    terminal = PseudoTerminal([sys.executable, "-c", DEAF, *COMMAND])
    terminal.wait_for("ready")
    (engine,) = children(terminal.process.pid)
    os.close(terminal.master)
    try:
        assert terminal.process.wait(30) == 1
        psutil.wait_procs([psutil.Process(engine)] if psutil.pid_exists(engine) else [], timeout=30)
        assert not psutil.pid_exists(engine) or psutil.Process(engine).status() == psutil.STATUS_ZOMBIE
    finally:
        terminal.process.kill()
        terminal.process.wait()


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def begin_an_answer(plain: PseudoTerminal) -> None:
    plain.send("hello\n")
    plain.wait_for("hello\r\n")  # the terminal's echo
    begun = len(plain.output)
    while len(plain.output) < begun + 20:
        assert plain.read()


def test_plain_mode_writes_no_escape_sequence(plain: PseudoTerminal) -> None:
    plain.wait_for("> ")
    plain.send("/new\n")
    plain.wait_for("> ")
    begin_an_answer(plain)
    plain.send("\x03")
    plain.wait_for("tok/s")
    plain.send("/quit\n")
    assert plain.end() == 0
    assert "\x1b" not in plain.output


def test_ctrl_c_in_plain_mode_stops_the_answer_then_ends_with_130(plain: PseudoTerminal) -> None:
    plain.wait_for("> ")
    begin_an_answer(plain)
    plain.send("\x03")
    plain.wait_for("[abort")
    plain.wait_for("> ")
    plain.send("\x03")
    assert plain.end() == 130
    assert "Traceback" not in plain.output
