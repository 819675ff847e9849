"""Numbers as users hand them over, Python's or numpy's, as plain Python ones; bytes as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import SupportsIndex


def whole(value: object) -> int:
    """A whole number; TypeError for what is none: True, 1.0, "1"."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError
    return index(value)


def wholes(values: Iterable[object]) -> list[int] | None:
    """All of them as whole numbers; None if one is none."""
    try:
        return [whole(value) for value in values]
    except TypeError:
        return None


def number(value: object) -> float:
    """A real number; TypeError for what is none, OverflowError for what no float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def size(count: int) -> str:
    """Bytes in powers of a thousand: 5 B, 46.1 kB, 538 MB, 4.6 GB."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":  # what would be rounded to 1000 is one of the next
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
