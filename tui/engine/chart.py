"""Charts from zero, in block characters: what hardly changes looks flat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content

from .format import short

_LEVELS = " ▁▂▃▄▅▆▇█"
_STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
Columns = Callable[[int], Sequence[float]]  # values, given how many


def ceiling(values: Sequence[float]) -> float:
    """The top of the scale: the next round number; 1 where nothing is above zero."""
    most = max(values, default=0.0)
    if most <= 0:
        return 1.0
    magnitude = 1.0
    while magnitude * 10 < most:
        magnitude *= 10
    while magnitude >= most:
        magnitude /= 10
    return next(magnitude * step for step in _STEPS if magnitude * step >= most * (1 - 1e-9))


def bars(values: Sequence[float], rows: int, top: float) -> list[str]:
    """Lines from the top one down; a value above zero shows at least the lowest level."""
    levels = [min(8 * rows, max(round(8 * rows * v / top), 1)) if v > 0 else 0 for v in values]
    return [
        "".join(_LEVELS[max(0, min(8, level - 8 * row))] for level in levels) for row in reversed(range(rows))
    ]


def chart(columns: Columns, width: int, rows: int, top: float | None = None, unit: str = "") -> list[Content]:
    """`rows` lines of bars with their scale, and the line of zero under them.

    Args:
        columns: the values, oldest first.
        top: of the scale, if it is to stay the same whatever the values are.
        unit: behind the numbers of the scale.
    """
    room = 5 + len(unit)
    values = list(columns(max(1, width - room - 1)))
    high = ceiling(values) if top is None else top
    marks = [f"{short(high)}{unit}", *[""] * (rows - 1)]
    lines = [
        Content.assemble((f"{mark:>{room}}{'┤' if mark else '│'}", "dim"), (line, "$accent"))
        for mark, line in zip(marks, bars(values, rows, high), strict=True)
    ]
    return [*lines, Content.styled(f"{'0' + unit:>{room}}┴ last 60 s", "dim")]


def sparkline(columns: Columns, width: int) -> Content:
    """One row, its top in front of it."""
    values = list(columns(max(1, width - 6)))
    high = ceiling(values)
    return Content.assemble((f"{short(high):>5}┤", "dim"), (bars(values, 1, high)[0], "$accent"))
