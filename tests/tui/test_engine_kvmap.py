"""The KV map: glyphs that carry the meaning, counts that are exact."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferrum_mlx.metrics import CACHED, FREE, KVMap
from ferrum_tui.engine.kvmap import blocks_a_cell, count, count_all, glyph, legend, map_lines

from .engine_readings import KV

BLOCKS = st.lists(st.integers(CACHED, 4), min_size=1, max_size=300)


@given(BLOCKS)
def test_counts_are_those_of_the_blocks(blocks: list[int]) -> None:
    counts = count(tuple(blocks))
    users = [n for n in blocks if n > 1]
    assert (counts.used, counts.cached, counts.free) == (
        blocks.count(1),
        blocks.count(CACHED),
        blocks.count(FREE),
    )
    assert (counts.shared, counts.references) == (len(users), sum(users))
    assert counts.total == len(blocks)


@given(BLOCKS, st.integers(1, 60), st.integers(1, 4))
def test_the_map_fits_and_shows_every_block_in_use(blocks: list[int], width: int, rows: int) -> None:
    lines = [line.plain for line in map_lines(KVMap(("full",), (tuple(blocks),)), width, rows)]
    assert len(lines) <= rows
    assert all(len(line) <= width for line in lines)
    a_cell = blocks_a_cell(len(blocks), width * rows)
    cells = "".join(lines)
    assert len(cells) == -(-len(blocks) // a_cell)
    for i, cell in enumerate(cells):
        assert (cell == "·") == (set(blocks[i * a_cell : (i + 1) * a_cell]) == {FREE})


def test_a_cell_shows_what_most_of_it_is() -> None:
    assert [glyph(count(blocks)) for blocks in ((0, 0), (0, 1), (2, 2, 1), (CACHED, CACHED, 3))] == list(
        "·█▓░"
    )


def test_exact_text() -> None:
    assert [line.plain for line in map_lines(KV, 25, 4)] == [
        "█" * 25,
        "█" * 5 + "▓" * 10 + "░" * 10,
        "░" * 10 + "·" * 15,
        "·" * 25,
    ]


def test_legend_in_one_line_or_two() -> None:
    counts = count_all(KV)
    whole = "█ used 30  ▓ shared 10×2.2  ░ cached 20  · free 40  cell=10 blk"
    assert [line.plain for line in legend(counts, 10, len(whole))] == [whole]
    assert [line.plain for line in legend(counts, 10, len(whole) - 1)] == [
        "█ used 30  ▓ shared 10×2.2  cell=10 blk",
        "░ cached 20  · free 40",
    ]


def test_groups_stand_one_after_the_other_by_name() -> None:
    kv = KVMap(("full", "window 512"), ((1, 1, FREE), (CACHED, 2)))
    assert [line.plain for line in map_lines(kv, 10, 2)] == ["full: 3 blk", "██·", "window 512: 2 blk", "░▓"]
    assert count_all(kv).total == 5
