"""A box to type in above a list of rows: what the pickers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList

from ferrum_mlx.sanitize import sanitize

Cell = tuple[str, str]  # text, style
_GAP = 2  # cells between columns


class SearchBox(Input):
    """What is typed filters; the arrows move in the list below without leaving the box."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "list('cursor_up')", "Row above", show=False),
        Binding("down", "list('cursor_down')", "Row below", show=False),
        Binding("pageup", "list('page_up')", "Page above", show=False),
        Binding("pagedown", "list('page_down')", "Page below", show=False),
    ]

    def __init__(self, placeholder: str, value: str = "") -> None:
        super().__init__(value, placeholder=placeholder, compact=True, select_on_focus=False)

    async def action_list(self, what: str) -> None:
        await self.screen.query_one(OptionList).run_action(what)


def table(
    rows: Sequence[Sequence[Cell]], width: int, *, elastic: int, drop: Sequence[int] = ()
) -> list[Content]:
    """Rows in columns, each one line of at most `width` cells; texts are made safe for a terminal.

    Args:
        rows: all of the same length.
        elastic: the column that is cut where the others leave too little room.
        drop: columns to leave out while the rest does not fit, the least important first; of the elastic
            one, half the width is enough.
    """
    if not rows:
        return []
    made = [[Content.styled(_line(text), style) for text, style in row] for row in rows]
    widths = [max(row[i].cell_length for row in made) for i in range(len(rows[0]))]
    shown = [i for i, wide in enumerate(widths) if wide]
    enough = [*widths[:elastic], min(widths[elastic], width // 2), *widths[elastic + 1 :]]
    for column in drop:
        if _needed(enough, shown) <= width:
            break
        shown = [i for i in shown if i != column]
    spare = width - _needed(widths, shown)
    if spare < 0:
        widths[elastic] = max(widths[elastic] + spare, 1)
    gap = Content(" " * _GAP)
    return [
        gap.join(row[i].truncate(widths[i], ellipsis=True, pad=True) for i in shown).truncate(width)
        for row in made
    ]


def _needed(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def _line(text: str) -> str:
    return " ".join(sanitize(text).split())


def countdown(seconds: float) -> str:
    """A rest of time, such as 4:05 or 1:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
