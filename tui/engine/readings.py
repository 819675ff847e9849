"""A text of readings that follows what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from textual.content import Content
from textual.widgets import Static


class Feed(Protocol):
    """What may change, and says so, in the screen's thread."""

    def subscribe(self, watcher: Callable[[], None]) -> None: ...

    def unsubscribe(self, watcher: Callable[[], None]) -> None: ...


F = TypeVar("F", bound=Feed)
Lines = Callable[[F, int], Sequence[Content]]  # for a width in cells


class Readings(Static, Generic[F]):
    """Redrawn when the feed changes or the width does, and at no other time."""

    def __init__(self, feed: F, lines: Lines[F], id: str | None = None) -> None:
        super().__init__(markup=False, id=id)
        self.feed, self._lines = feed, lines
        self._shown: Sequence[Content] = ()

    def on_mount(self) -> None:
        self.feed.subscribe(self.redraw)

    def on_unmount(self) -> None:
        self.feed.unsubscribe(self.redraw)

    def on_resize(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        width = self.content_size.width
        if not width:  # not on the screen; a resize tells when it is
            return
        lines = [line.truncate(width, ellipsis=True) for line in self._lines(self.feed, width)]
        if lines != self._shown:
            self.update(Content("\n").join(lines), layout=len(lines) != len(self._shown))
            self._shown = lines
