"""Numbers as users hand them over, Python's or numpy's, as plain Python ones."""

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
