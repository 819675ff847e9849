"""The tests of a benchmark as tables: a line a system, or where that is too long up to three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from textual.content import Content

from ferrum_mlx.bench.progress import Key, Row
from ferrum_mlx.bench.report import Line, Spread
from ferrum_mlx.sanitize import sanitize

from ..engine.format import Part, milliseconds
from .board import Board

# figure → what it is, with its unit
_FIGURES = {
    "prefill_tps": "prefill, tok/s",
    "decode_tps": "decode, tok/s",
    "output_tps": "output, tok/s",
    "longest_gap_s": "longest gap, ms; less is better",
}
_WAITING, _RUNNING = ("·", "dim"), ("▶", "$accent")
_COMPLETE, LEFT_OUT = ("✓", "$text-success"), ("✖", "dim")
_EIGHTHS = " ▏▎▍▌▋▊▉"
_GAP = "  "
_COUNT, _VALUE, _TTFT, _RATIO = 5, 8, 7, 17  # cells of columns
_NARROWEST_BAR, _WIDEST_BAR = 4, 40


def tables(board: Board, width: int) -> Iterator[Content]:
    lines, ratios = board.lines(), board.ratios()
    names = max((len(system_of(row)) for row in board.rows), default=0)
    for number, (_, group) in enumerate(groupby(board.rows, lambda row: row.key[:2])):
        if number:
            yield Content("")
        yield from _Table(board, list(group), lines, ratios).lines(names, width)


class _Table:
    """Of one test; a bar is scaled from zero to the most of any system."""

    def __init__(
        self, board: Board, rows: Sequence[Row], lines: Mapping[Key, Line], ratios: Mapping[Key, Line]
    ) -> None:
        self._board, self._rows, self._ratios = board, rows, ratios
        self._figure = rows[0].figure
        self._found = {row.key: lines[row.key].figures for row in rows if row.key in lines}
        values = [figures[self._figure].median for figures in self._found.values() if self._figure in figures]
        self._most = max(values, default=0.0)

    def lines(self, names: int, width: int) -> Iterator[Content]:
        """In that many cells, of which `names` would hold every system's name."""
        before = 2 + names + len(_GAP) + _COUNT + len(_GAP) + _VALUE + len(_GAP)  # the bar
        room = min(_WIDEST_BAR, width - before - 2 * len(_GAP) - _TTFT - _RATIO)
        what = Content.assemble((case_of(self._rows[0].key), "bold"), (f"  {_FIGURES[self._figure]}", "dim"))
        if room < _NARROWEST_BAR:
            yield what.truncate(width, ellipsis=True)
            for row in self._rows:
                yield from self._stacked(row, min(names, width - 2 - len(_GAP) - _COUNT), width)
            return
        heads = ["TTFT ms" if self._has_ttft else "", "ours ÷ it (range)" if self._ratio_known else ""]
        what = what.truncate(before + room, ellipsis=True)
        after = f"{_GAP}{heads[0]:>{_TTFT}}{_GAP}{heads[1]}"
        yield Content.assemble(what.pad_right(before + room - what.cell_length), (after, "dim"))
        for row in self._rows:
            ttft = Content.styled(f"{self._ttft(row):>{_TTFT}}", "dim")
            yield Content(_GAP).join(
                [self._head(row, names), self._value(row), self._bar(row, room), ttft, self._ratio(row)]
            )

    def _stacked(self, row: Row, names: int, width: int) -> Iterator[Content]:
        yield self._head(row, max(1, names))
        if row.key not in self._found:
            return
        ratio = self._ratio(row)
        longest = max(len(self._ttft(each)) for each in self._rows)  # the same for all: bars are compared
        said = f"TTFT {self._ttft(row):>{longest}} ms" if self._ttft(row) else ""
        beside = len("TTFT  ms") + longest if longest else 0
        room = max(1, min(_WIDEST_BAR, width - _VALUE - 3 * len(_GAP) - beside))
        yield Content(_GAP).join(
            [Content(""), self._value(row), self._bar(row, room), Content.styled(said, "dim")]
        )
        if ratio:
            yield Content.assemble(_GAP, ("ours ÷ it  ", "dim"), ratio)

    def _head(self, row: Row, width: int) -> Content:
        name = Content(system_of(row)).truncate(width, ellipsis=True)
        name = name.pad_right(width - name.cell_length)
        count = f"{self._board.count(row.key)}/{row.repetitions}"
        return Content.assemble(self._glyph(row), " ", name, _GAP, (f"{count:>{_COUNT}}", "dim"))

    def _glyph(self, row: Row) -> Part:
        if row.key in self._board.skipped:
            return LEFT_OUT
        if self._board.now is not None and self._board.now.key == row.key:
            return _RUNNING
        return _COMPLETE if self._board.count(row.key) >= row.repetitions else _WAITING

    def _is_ours(self, row: Row) -> bool:
        return self._board.plan is not None and row.key[2] == self._board.plan.ours

    def _median(self, row: Row, figure: str) -> Spread | None:
        return self._found.get(row.key, {}).get(figure)

    def _value(self, row: Row) -> Content:
        found = self._median(row, self._figure)
        seconds = self._figure.endswith("_s")
        shown = (milliseconds(found.median) if seconds else f"{found.median:,.1f}") if found else "–"
        return Content.styled(f"{shown:>{_VALUE}}", "bold" if self._is_ours(row) else "")

    def _bar(self, row: Row, width: int) -> Content:
        found = self._median(row, self._figure)
        share = found.median / self._most if found and self._most else 0.0
        return Content.styled(
            f"{blocks(share, width):<{width}}", "$accent" if self._is_ours(row) else "$secondary"
        )

    def _ttft(self, row: Row) -> str:
        found = self._median(row, "ttft_s")
        return milliseconds(found.median) if found else ""

    def _ratio(self, row: Row) -> Content:
        line = self._ratios.get(row.key)
        found = line.figures.get(self._figure) if line else None
        if found is None:
            return Content("")
        spread = f" ({found.min:.2f}–{found.max:.2f})"
        return Content.assemble((f"{found.median:.2f}", "bold"), (spread, "dim"))

    @property
    def _has_ttft(self) -> bool:
        return any(self._ttft(row) for row in self._rows)

    @property
    def _ratio_known(self) -> bool:
        return any(row.key in self._ratios for row in self._rows)


def blocks(share: float, width: int) -> str:
    """A bar from zero, in eighths of a cell; what is above zero shows."""
    eighths = max(round(8 * width * share), 1) if share > 0 else 0
    full, part = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[part] if part else "")


def case_of(key: Key) -> str:
    return f"{key[0]} × {key[1]}" if key[1] > 1 else key[0]


def system_of(row: Row) -> str:
    return clean(f"{row.key[2]} {row.method}".strip())


def clean(text: str) -> str:
    """Of somebody else, on one line."""
    return " ".join(sanitize(text).split())
