"""The engine on the whole screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen

from . import sections
from .chart import chart
from .feed import EngineFeed
from .queue import queue, table
from .readings import Readings

_CHART_ROWS, _LOW_ROWS, _MAP_ROWS = 4, 2, 12


class EngineScreen(ModalScreen[None]):
    """Requests one by one, the last minute, the whole KV map, memory, and the facts of the load."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+b,q", "dismiss", "Close", id="engine.close"),
    ]

    def __init__(self, feed: EngineFeed) -> None:
        super().__init__()
        self._feed = feed

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="engine-body") as body:
            body.border_title = "engine"
            body.border_subtitle = "↑ ↓ scroll · Esc closes"
            yield Readings(self._feed, screen_lines)


def screen_lines(feed: EngineFeed, width: int) -> list[Content]:
    if feed.ready is None:
        return sections.absence(feed)
    history = feed.history
    parts: list[Sequence[Content]] = [
        sections.speed(feed, _CHART_ROWS, width),
        sections.latency(feed, width),
        [_title("PREFILL tok/s"), *chart(history.prefill_rates, width, _LOW_ROWS)],
        [
            _title("KV IN USE"),
            *chart(lambda count: _percent(history.kv_shares(count)), width, _LOW_ROWS, 100.0, "%"),
        ],
        [*queue(feed, 0)[:1], *table(feed)],
        sections.kv_pool(feed, _MAP_ROWS, width),
        [
            *sections.prefix(feed),
            *sections.speculation(feed),
            *sections.adapters(feed),
            *sections.memory(feed, width),
        ],
        sections.off(feed),
        sections.model(feed),
    ]
    return [line for part in parts if part for line in (*part, Content(""))][:-1]


def _title(text: str) -> Content:
    return Content.styled(text, "bold")


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]
