"""A text of an engine's readings that follows its feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content
from textual.widgets import Static

from .feed import EngineFeed

Lines = Callable[[EngineFeed, int], Sequence[Content]]  # for a width in cells


class Readings(Static):
    """Redrawn when the feed changes or the width does, and at no other time."""

    def __init__(self, feed: EngineFeed, lines: Lines) -> None:
        super().__init__(markup=False)
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
