"""The KV map: blocks by state, exact counts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content

from ferrum_mlx.metrics import CACHED, FREE, KVMap

from .format import Part, fit

USED_GLYPH, SHARED_GLYPH, CACHED_GLYPH, FREE_GLYPH = "█", "▓", "░", "·"
_STYLES = {USED_GLYPH: "$accent", SHARED_GLYPH: "$success", CACHED_GLYPH: "$secondary", FREE_GLYPH: "dim"}


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by state. `shared` are in use by several requests, by `references` in all; `used` by one."""

    used: int = 0
    shared: int = 0
    references: int = 0
    cached: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        return self.used + self.shared + self.cached + self.free

    @property
    def share_in_use(self) -> float:
        return (self.used + self.shared) / self.total if self.total else 0.0


def count(blocks: Sequence[int]) -> Counts:
    free, cached, used = blocks.count(FREE), blocks.count(CACHED), blocks.count(1)
    shared = len(blocks) - free - cached - used
    references = sum(blocks) + cached - used if shared else 0  # CACHED counts as -1
    return Counts(used, shared, references, cached, free)


def count_all(kv: KVMap) -> Counts:
    each = [count(blocks) for blocks in kv.blocks]
    return Counts(
        used=sum(one.used for one in each),
        shared=sum(one.shared for one in each),
        references=sum(one.references for one in each),
        cached=sum(one.cached for one in each),
        free=sum(one.free for one in each),
    )


def glyph(counts: Counts) -> str:
    """Of a cell: the commonest of its states, but free only where all of its blocks are."""
    order = (
        (counts.used, USED_GLYPH),
        (counts.shared, SHARED_GLYPH),
        (counts.cached, CACHED_GLYPH),
    )
    most, found = max(order, key=lambda pair: pair[0])
    return found if most else FREE_GLYPH


def blocks_a_cell(total: int, cells: int) -> int:
    return max(1, -(-total // max(1, cells)))


def rows_of(blocks: Sequence[int], width: int, a_cell: int) -> list[Content]:
    """A pool in rows of `width` cells, each standing for `a_cell` blocks that follow one another."""
    glyphs = [glyph(count(blocks[i : i + a_cell])) for i in range(0, len(blocks), a_cell)]
    rows = [glyphs[i : i + width] for i in range(0, len(glyphs), width)]
    return [Content.assemble(*((g * len(list(run)), _STYLES[g]) for g, run in groupby(row))) for row in rows]


def map_lines(kv: KVMap, width: int, rows: int) -> list[Content]:
    """All pools one after the other, in about `rows` rows; named where there are several."""
    total = sum(map(len, kv.blocks))
    a_cell = blocks_a_cell(total, width * rows)
    lines = []
    for name, blocks in zip(kv.groups, kv.blocks, strict=True):
        if len(kv.groups) > 1:
            lines.append(Content.styled(f"{name}: {len(blocks):,} blk", "dim"))
        lines += rows_of(blocks, width, a_cell)
    return lines


def legend(counts: Counts, a_cell: int, width: int) -> list[Content]:
    """The exact counts by glyph, in one line or two."""
    often = counts.references / counts.shared if counts.shared else 0.0
    used: list[Part] = [(USED_GLYPH, _STYLES[USED_GLYPH]), (f" used {counts.used:,}", "")]
    times = f"×{often:.1f}" if counts.shared else ""
    shared: list[Part] = [(SHARED_GLYPH, _STYLES[SHARED_GLYPH]), (f" shared {counts.shared:,}{times}", "")]
    cached: list[Part] = [(CACHED_GLYPH, _STYLES[CACHED_GLYPH]), (f" cached {counts.cached:,}", "")]
    free: list[Part] = [(FREE_GLYPH, _STYLES[FREE_GLYPH]), (f" free {counts.free:,}", "")]
    cell: list[Part] = [(f"cell={a_cell:,} blk", "dim")]
    groups = [used, shared, cached, free, cell]
    whole = Content.assemble(*(part for group in groups for part in [*group, ("  ", "")])).rstrip()
    if whole.cell_length <= width:
        return [whole]
    return [line for line in (fit([used, shared, cell], width), fit([cached, free], width)) if line]
