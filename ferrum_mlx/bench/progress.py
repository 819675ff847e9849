"""What a benchmark tells whoever watches it: small, plain, and all of it can be pickled.

It is told between runs, never while one is measured. First `Ready`, and a `Check` whenever one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferrum_mlx.bench.checks import Check
from ferrum_mlx.bench.trace import Figures
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Ready

Key = tuple[str, int, str]  # test, streams, system


@dataclass(frozen=True, slots=True)
class Row:
    """A test on a system; `figure` is the one that matters for it."""

    key: Key
    method: str
    figure: str
    repetitions: int


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to run, as far as the systems are known by now; of a test, `ours` comes first."""

    ours: str
    rows: tuple[Row, ...]
    reps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A run to measure; `rep` counts from 0."""

    key: Key
    rep: int


@dataclass(frozen=True, slots=True)
class Kept:
    key: Key
    rep: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Skipped:
    key: Key
    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Bandwidth:
    bytes_per_s: float


Told = Ready | Planned | Begun | Kept | Skipped | Absent | Bandwidth | Check
Tell = Callable[[Told], None]


@dataclass(frozen=True, slots=True)
class Said:
    """A line of narration."""

    what: str


@dataclass(frozen=True, slots=True)
class Reported:
    """For stdout; what is said from now on is to be read below it."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """With the exit code of the command; `error` is why there is no report."""

    code: int
    error: FerrumError | None = None


Event = Told | Said | Reported | Ended  # of a benchmark in a process of its own


def untold(event: Told) -> None:
    """Nobody watches."""
