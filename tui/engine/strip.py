"""The engine in two lines, for narrow screens."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content

from . import sections
from .chart import sparkline
from .feed import EngineFeed
from .format import Part, fit, milliseconds
from .kvmap import blocks_a_cell, count_all, rows_of
from .readings import Readings

_CHART, _MAP = 22, 24  # cells


class EngineStrip(Container):
    """What does not fit is left out, the least important first."""

    def __init__(self, feed: EngineFeed) -> None:
        super().__init__()
        self._readings = Readings(feed, strip_lines)

    def compose(self) -> ComposeResult:
        yield self._readings


def strip_lines(feed: EngineFeed, width: int) -> list[Content]:
    if feed.ready is None:
        return sections.absence(feed)[:2]
    return [_first(feed, width), _second(feed, width)]


def _first(feed: EngineFeed, width: int) -> Content:
    line = sparkline(feed.history.decode_rates, min(_CHART, width // 2))
    groups: list[list[Part]] = [[(f" {feed.now_tps:.1f}", "bold $text-accent"), (" tok/s", "dim")]]
    if (ttft := feed.ttft) is not None:
        groups.append([("TTFT ", "dim"), (f"{milliseconds(ttft.last)} ms", "")])
    if (itl := feed.itl) is not None:
        groups.append([("ITL ", "dim"), (f"{milliseconds(itl.p50)} ms", "")])
    totals = feed.totals
    if totals.admitted_tokens:
        groups.append([("hit ", "dim"), (f"{totals.cached_tokens / totals.admitted_tokens:.0%}", "")])
    stats = feed.step.speculation if feed.step else None
    if stats is not None and stats.verifies:
        groups.append([("spec ", "dim"), (f"{stats.acceptance_rate:.0%}", "")])
    return line + fit(groups, width - line.cell_length)


def _second(feed: EngineFeed, width: int) -> Content:
    view, step, ready = feed.view, feed.step, feed.ready
    groups: list[list[Part]] = []
    line = Content.styled("KV ", "dim")
    if view is not None:
        cells = min(_MAP, width // 2)
        counts = count_all(view.kv)
        blocks = [block for group in view.kv.blocks for block in group]
        line = Content.assemble(line, *rows_of(blocks, cells, blocks_a_cell(len(blocks), cells)))
        groups.append([(f" {counts.share_in_use:.0%}", ""), (f" of {counts.total:,} blk", "dim")])
    groups.append([(f"run {step.running if step else 0}", ""), (f" wait {step.waiting if step else 0}", "")])
    if step is not None and step.preemptions:
        groups[-1].append((f" preempt {step.preemptions}", ""))
    if ready is not None and view is not None and ready.memory_limit_bytes:
        groups.append([("mem ", "dim"), (f"{view.memory_bytes / ready.memory_limit_bytes:.0%}", "")])
    return line + fit(groups, width - line.cell_length)
