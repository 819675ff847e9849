"""The real program in a real pseudo-terminal, on the fake backend."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

WAIT = 60.0  # seconds before a test gives up; never a measure of speed
# What a login shell does: takes the terminal as its controlling one, so that Ctrl+C is a signal.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios as t; fcntl.ioctl(0, t.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
COMMAND = [sys.executable, "-m", "ferrum_mlx", "chat", "--backend", "fake"]


class Terminal:
    """A program on a terminal of 100 columns and 30 rows, and all that it wrote."""

    def __init__(self, args: list[str], env: dict[str, str] | None = None) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.output = ""
        self._seen = 0  # characters of it up to what was last waited for

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` comes, behind what was waited for before."""
        deadline = time.monotonic() + WAIT
        while (at := self.output.find(text, self._seen)) < 0:
            rest = self.output[self._seen :]
            assert time.monotonic() < deadline, f"no {text!r} in {rest!r}"
            assert self.read(), f"ended without {text!r}: {rest!r}"
        self._seen = at + len(text)

    def read(self) -> bool:
        """Read what there is; False at the end."""
        if not select.select([self.master], [], [], 0.1)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux's word for the end of a pseudo-terminal
            return False
        self.output += data.decode(errors="replace")
        return bool(data)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self.read():
            pass
        return self.process.wait(WAIT)


def opened(args: list[str]) -> Iterator[Terminal]:
    terminal = Terminal(args)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    yield from opened(COMMAND)


@pytest.fixture
def plain() -> Iterator[Terminal]:
    yield from opened([*COMMAND, "--plain", "--max-model-len", "200000"])


def test_a_conversation_and_ctrl_d(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    terminal.type("hello\r")
    terminal.wait_for("hello")
    terminal.wait_for("TTFT")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert terminal.output.count("\x1b[?1049h") == terminal.output.count("\x1b[?1049l") == 1


def test_ctrl_c_twice_quits(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    terminal.type("\x03")
    terminal.wait_for("again quits")
    terminal.type("\x03")
    assert terminal.end() == 0


def test_what_is_typed_at_once_is_obeyed_in_order(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    terminal.type("first\nline\rdraft")
    terminal.wait_for("draft")
    terminal.wait_for("TTFT")
    terminal.type("\x11")
    assert terminal.end() == 0


def test_killed_engine_is_replaced_under_the_screen(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    (child,) = children(terminal.process.pid)
    os.kill(child, signal.SIGKILL)
    terminal.wait_for("killed by signal 9")
    terminal.wait_for("ready")
    terminal.type("hello\r")
    terminal.wait_for("TTFT")
    terminal.type("\x04")
    assert terminal.end() == 0


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def begin_an_answer(plain: Terminal) -> None:
    plain.type("hello\n")
    plain.wait_for("hello\r\n")  # the terminal's echo
    while len(plain.output) < plain._seen + 20:
        assert plain.read()


def test_plain_mode_writes_no_escape_sequence(plain: Terminal) -> None:
    plain.wait_for("> ")
    plain.type("/new\n")
    plain.wait_for("> ")
    begin_an_answer(plain)
    plain.type("\x03")
    plain.wait_for("tok/s")
    plain.type("/quit\n")
    assert plain.end() == 0
    assert "\x1b" not in plain.output


def test_ctrl_c_in_plain_mode_stops_the_answer_then_ends_with_130(plain: Terminal) -> None:
    plain.wait_for("> ")
    begin_an_answer(plain)
    plain.type("\x03")
    plain.wait_for("[abort")
    plain.wait_for("> ")
    plain.type("\x03")
    assert plain.end() == 130
    assert "Traceback" not in plain.output
