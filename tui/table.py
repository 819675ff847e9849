"""A Markdown table fitted to a width: what does not fit wraps within its column, and is never cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from textual.content import Content

_GAP = 2  # cells between columns
_NARROWEST = 6  # cells of a column; where that is not to be had, each cell has a line of its own
_RULE = "$foreground 55%"
_NONE = Content("")


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` of cells, the heads first; `rights` says which columns stand at their right edge."""

    rows: Sequence[Sequence[Content]]
    rights: Sequence[bool]

    def lines(self, width: int) -> Iterator[Content]:
        """The table in that many cells."""
        natural = [max(map(_width, column)) for column in zip_longest(*self.rows, fillvalue=_NONE)]
        widths = _shrunk(natural, width - _GAP * (len(natural) - 1))
        if any(cells < min(wish, _NARROWEST) for cells, wish in zip(widths, natural, strict=True)):
            yield from self._one_below_another(width)
            return
        yield from self._row(0, widths)
        yield _rule(widths, "─")
        wrapped = widths != natural
        for number in range(1, len(self.rows)):
            if wrapped and number > 1:
                yield _rule(widths, "╌")
            yield from self._row(number, widths)

    def _row(self, number: int, widths: Sequence[int]) -> Iterator[Content]:
        cells = [cell.wrap(max(width, 1)) for cell, width in zip(self.rows[number], widths, strict=True)]
        for pieces in zip_longest(*cells, fillvalue=_NONE):
            line = Content(" " * _GAP).join(
                (piece.pad_left if right else piece.pad_right)(max(width - piece.cell_length, 0))
                for piece, right, width in zip(pieces, self.rights, widths, strict=True)
            )
            yield line.stylize_before("bold") if number == 0 else line

    def _one_below_another(self, width: int) -> Iterator[Content]:
        heads = self.rows[0]
        for number, row in enumerate(self.rows[1:] or [[_NONE] * len(heads)]):
            if number:
                yield _NONE
            for head, cell in zip(heads, row, strict=True):
                yield from Content.assemble(head.stylize_before("bold"), ": ", cell).wrap(max(width, 1))


def _width(cell: Content) -> int:
    return max((line.cell_length for line in cell.split()), default=0)


def _shrunk(natural: Sequence[int], room: int) -> list[int]:
    """The widths of columns: narrow ones stay as they are, the others share the rest."""
    widths, left = list(natural), room
    by_width = sorted(range(len(natural)), key=natural.__getitem__)
    for done, column in enumerate(by_width):
        widths[column] = min(natural[column], left // (len(natural) - done))
        left -= widths[column]
    return widths


def _rule(widths: Sequence[int], dash: str) -> Content:
    return Content.styled((" " * _GAP).join(dash * width for width in widths), _RULE)
