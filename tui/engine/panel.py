"""The engine beside the chat."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from . import sections
from .feed import EngineFeed
from .queue import queue
from .readings import Readings

_CHART_ROWS, _MAP_ROWS, _REQUESTS = 3, 3, 6


class EnginePanel(VerticalScroll, can_focus=False):
    """Everything worth a look while an answer comes; the wheel scrolls what does not fit."""

    def __init__(self, feed: EngineFeed) -> None:
        super().__init__()
        self.border_title = "engine"
        self._readings = Readings(feed, panel_lines)

    def compose(self) -> ComposeResult:
        yield self._readings


def panel_lines(feed: EngineFeed, width: int) -> list[Content]:
    if feed.ready is None:
        return sections.absence(feed)
    return [
        *sections.speed(feed, _CHART_ROWS, width),
        *sections.latency(feed, width),
        Content(""),
        *sections.kv_pool(feed, _MAP_ROWS, width),
        *sections.prefix(feed),
        *sections.speculation(feed),
        *sections.adapters(feed),
        *sections.memory(feed, width),
        *queue(feed, _REQUESTS),
        *sections.off(feed),
    ]
