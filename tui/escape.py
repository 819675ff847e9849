"""A lone Esc, noticed in time.

Esc is also the first byte of every other special key, so a terminal's reader has to wait for what follows.
Textual waits 100 ms, and looks whether they are over ten times a second only: Esc would be told 100 to
200 ms late. Here it waits ESC_DELAY, and looks when they are over. What would be stopped by it is told
at the byte itself, so that it can hold still until then. Terminals with the Kitty keyboard protocol tell Esc
apart, without any wait.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.message import Message

_OF_KITTY = "\x1b[27u"  # an Esc that is sure
ESC_DELAY = 25  # ms in which the rest of a key's bytes comes, over a slow line, too

_suspected: Callable[[], None] | None = None


class _Selector(selectors.SelectSelector):
    """After input, the first wait ends when an escape sequence would have."""

    _heard = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        soon = 1.2 * ESC_DELAY / 1000
        events = super().select(soon if self._heard and (timeout is None or timeout > soon) else timeout)
        self._heard = bool(events)
        return events


def notice_escape() -> None:
    """Call it before Textual is imported: it reads the delay once. A user's own ESCDELAY stays."""
    os.environ.setdefault("ESCDELAY", str(ESC_DELAY))
    from textual._xterm_parser import XTermParser
    from textual.drivers import linux_driver

    class Parser(XTermParser):
        def feed(self, data: str) -> Iterable[Message]:
            if _suspected is not None and data.endswith(("\x1b", _OF_KITTY)):
                _suspected()
            return super().feed(data)

    ours = {"SelectSelector": _Selector}
    vars(linux_driver).update(selectors=SimpleNamespace(**(vars(selectors) | ours)), XTermParser=Parser)


def when_suspected(told: Callable[[], None]) -> None:
    """Have it called, in the reader's thread, when Esc may have been pressed, ESC_DELAY before it is sure."""
    global _suspected
    _suspected = told
