"""What a terminal shows: the program's bytes as pyte, an independent terminal, draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pyte

from ferrum_tui.pseudo_terminal import PseudoTerminal

_WAIT = 60.0  # seconds before a test gives up; never a measure of speed


class ShownTerminal(PseudoTerminal):
    """A program on a terminal whose cells can be read."""

    def __init__(
        self, args: list[str], env: Mapping[str, str] | None = None, *, columns: int = 100, rows: int = 30
    ) -> None:
        self._cells = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._cells)
        super().__init__(args, env, columns=columns, rows=rows)

    def resize(self, columns: int, rows: int) -> None:
        super().resize(columns, rows)
        self._cells.resize(rows, columns)

    def read(self, patience: float = 0.1) -> bool:
        drawn = len(self.output)
        alive = super().read(patience)
        self._stream.feed(self.output[drawn:])
        return alive

    @property
    def lines(self) -> list[str]:
        return list(self._cells.display)

    @property
    def shown(self) -> str:
        return "\n".join(self._cells.display)

    def until(self, condition: Callable[[], bool]) -> None:
        """Read until the condition holds of what is shown."""
        deadline = time.monotonic() + _WAIT
        while not condition():
            assert time.monotonic() < deadline, self.shown
            assert self.read(), f"ended:\n{self.shown}"

    def until_shown(self, *texts: str) -> None:
        self.until(lambda: all(text in self.shown for text in texts))
