"""Tables keep every character at every width, and stay within it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content

from ferrum_tui.table import Table

CELLS = st.text(alphabet="ab 漢é", max_size=30)


def table(rows: list[list[str]], rights: list[bool] | None = None) -> Table:
    return Table([[Content(cell) for cell in row] for row in rows], rights or [False] * len(rows[0]))


def lines(made: Table, width: int) -> list[str]:
    return [line.plain.rstrip() for line in made.lines(width)]


def test_columns_are_aligned() -> None:
    made = table([["name", "n"], ["漢字", "1"], ["x", "1,000"]], [False, True])
    assert lines(made, 40) == ["name      n", "────  ─────", "漢字      1", "x     1,000"]


def test_what_does_not_fit_wraps_in_its_column() -> None:
    made = table([["a", "text"], ["1", "one two three four"], ["2", "five"]])
    assert lines(made, 13) == [
        "a  text",
        "─  ──────────",
        "1  one two",
        "   three four",
        "╌  ╌╌╌╌╌╌╌╌╌╌",
        "2  five",
    ]


def test_many_columns_in_few_cells_stand_below_one_another() -> None:
    made = table([["alpha", "beta", "gamma"], ["1one1", "2two2", "3three3"]])
    assert lines(made, 14) == ["alpha: 1one1", "beta: 2two2", "gamma: 3three3"]


@settings(max_examples=60)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(8, 90),
)
def test_nothing_is_lost_nor_wider_than_it_may_be(rows: list[list[str]], width: int) -> None:
    made = list(table(rows).lines(width))
    assert all(line.cell_length <= width for line in made)
    text = "".join(line.plain for line in made)
    for character in "ab漢é":
        assert text.count(character) >= "".join(cell for row in rows for cell in row).count(character)
