"""The screen of `ferrum-mlx bench --watch`.

It must not disturb what it shows. The benchmark runs in another process. This one draws when that tells
something, which is between two runs; the next one waits until that is done. While it is measured the
screen sleeps: no timer, no animation, no cursor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import PurePath
from typing import ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from ferrum_mlx.bench.progress import Begun, Event

from ..engine.readings import Readings
from ..theme import choose_theme
from . import lines
from .board import Board


class Source(Protocol):
    """A running benchmark."""

    def events(self) -> Iterator[Event]:
        """Up to its end; waits for each."""
        ...

    def drawn(self, begun: Begun) -> None:
        """That run is on the screen."""
        ...

    def interrupt(self) -> None:
        """Let it report what it has, and end."""
        ...

    def kill(self) -> None: ...


class Came(Message):
    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class Over(Message):
    """There is nothing more to tell."""


class _Driver(LinuxDriver):
    """Stdout may be a file that takes the report; the size is that of the terminal that is drawn on."""

    def _get_terminal_size(self) -> tuple[int, int]:
        terminal = sys.__stderr__  # sys.stderr is the app's own by now
        assert terminal is not None
        columns, rows = os.get_terminal_size(terminal.fileno())
        return columns or 80, rows or 24


class WatchApp(App[None]):
    """Ends with the benchmark.

    Args:
        theme: of the user's settings; "" is our own.

    Attributes:
        notes: what the user must know of it, once the screen has gone.
    """

    CSS_PATH: ClassVar[list[str | PurePath]] = ["../css/bench.tcss"]
    TITLE = "ferrum bench"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "stop", "Stop", priority=True, id="bench.stop"),
    ]

    def __init__(self, source: Source, theme: str = "") -> None:
        super().__init__(driver_class=_Driver)
        self.animation_level = "none"
        self.board = Board()
        self.notes: tuple[str, ...] = ()
        self._source, self._wanted = source, theme

    def compose(self) -> ComposeResult:
        yield Readings(self.board, lines.title, id="title")
        yield Readings(self.board, lines.progress, id="progress")
        with VerticalScroll(id="results"):
            yield Readings(self.board, lines.results)
        yield Readings(self.board, lines.keys, id="keys")

    def on_mount(self) -> None:
        self.notes = choose_theme(self, self._wanted)
        self.query_one("#results").focus()
        # Of `kill -INT`, as Ctrl+C is a key here: asyncio's own handler would leave the benchmark running.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_stop)
        threading.Thread(target=self._listen, name="bench-events", daemon=True).start()

    def on_unmount(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _listen(self) -> None:
        try:
            for event in self._source.events():
                self.post_message(Came(event))
        finally:
            self.post_message(Over())  # a screen that hears nothing any more would stay for ever

    def on_came(self, message: Came) -> None:
        self.board.take(message.event)
        if isinstance(message.event, Begun):
            self.call_after_refresh(self._source.drawn, message.event)

    def on_over(self) -> None:
        self.exit()

    def action_stop(self) -> None:
        """The first time it may report; the second time it ends."""
        if self.board.stopping:
            self._source.kill()
        else:
            self._source.interrupt()
            self.board.stop()
