"""The real program on a pseudo-terminal, and what a person would see on it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

import pyte

from ferrum_tui.pseudo_terminal import PseudoTerminal

WAIT = 120.0  # seconds before a test gives up; never a measure of speed
_WHOLE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[^\[\]])")
_UNKNOWN = re.compile(r"\x1b\[([<>=][0-?]*[ -/]*[@-~]|\?[\d;]*\$p)")  # to pyte, which would show their ends
_MOUSE, _OTHER_SCREEN, _CURSOR, _PASTE = {1000, 1002, 1003, 1006, 1015, 1016}, 1049, 25, 2004


class Glass(PseudoTerminal):
    """A terminal emulator reads along."""

    def __init__(
        self, args: list[str], env: Mapping[str, str], *, columns: int = 100, rows: int = 30
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._fed = 0  # characters of the output
        command = [sys.executable, "-m", "ferrum_mlx", "chat", *args]
        super().__init__(command, env, columns=columns, rows=rows)

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        super().resize(columns, rows)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def shown(self) -> str:
        return "\n".join(self.lines)

    def until(self, condition: Callable[[], bool], what: str = "") -> Self:
        """Read until the screen is as it should be."""
        deadline = time.monotonic() + WAIT
        while self._look() and not condition():
            assert time.monotonic() < deadline, f"{what} does not come:\n{self.shown}"
            assert self.read(), f"ended without {what}:\n{self.shown}\n{self.text[-2000:]}"
        return self

    def see(self, *words: str) -> Self:
        return self.until(lambda: all(word in self.shown for word in words), " and ".join(words))

    @property
    def restored(self) -> bool:
        """The terminal is as it was before: its screen, its cursor, its mouse."""
        self._look()
        modes = {mode >> 5 for mode in self._screen.mode}  # pyte shifts those of DEC
        return _CURSOR in modes and not modes & {*_MOUSE, _OTHER_SCREEN, _PASTE}

    def _look(self) -> bool:
        """Let the emulator read all but a sequence that is not whole yet."""
        new = self.output[self._fed :]
        last = new.rfind("\x1b")
        if last >= 0 and not _WHOLE.match(new, last):
            new = new[:last]
        self._fed += len(new)
        self._stream.feed(_UNKNOWN.sub("", new))
        return True
