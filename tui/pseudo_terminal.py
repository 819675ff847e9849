"""The real program on a pseudo-terminal: for tests and measurements."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Mapping
from types import TracebackType
from typing import Self

_WAIT = 120.0  # seconds before it is given up; never a measure of speed
# What a login shell does: takes the terminal as its controlling one, so that Ctrl+C is a signal.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios as t; fcntl.ioctl(0, t.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_=>])")


class PseudoTerminal:
    """A program on a terminal, and all that it wrote.

    Attributes:
        output: as it came.
        text: the same without escape sequences: what was drawn, in the order it was.
    """

    def __init__(
        self, args: list[str], env: Mapping[str, str] | None = None, *, columns: int = 100, rows: int = 30
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **(env or {})},
            start_new_session=True,
        )
        os.close(slave)
        self.output = ""
        self._decode = getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        self._seen = 0  # characters of `text` up to what was last waited for

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.output)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> float:
        """Read until `text` comes, behind what was waited for before; returns when, by time.time().

        Raises:
            TimeoutError, EOFError: it does not come; both say what came instead.
        """
        deadline = time.monotonic() + _WAIT
        while (at := self.text.find(text, self._seen)) < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} in {self.text[self._seen :]!r}")
            if not self.read():
                raise EOFError(f"ended without {text!r}: {self.text[self._seen :]!r}")
        self._seen = at + len(text)
        return time.time()

    def read(self, patience: float = 0.1) -> bool:
        """Read what there is; False at the end."""
        if not select.select([self.master], [], [], patience)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux's word for the end of a pseudo-terminal
            return False
        self.output += self._decode.decode(data)
        return bool(data)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self.read():
            pass
        return self.process.wait(_WAIT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
