"""What is known of a benchmark by now: the events of it, put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from ferrum_mlx.bench.checks import Check
from ferrum_mlx.bench.progress import (
    Absent,
    Bandwidth,
    Begun,
    Event,
    Kept,
    Key,
    Planned,
    Row,
    Said,
    Skipped,
)
from ferrum_mlx.bench.report import Line, Report
from ferrum_mlx.bench.runner import Results
from ferrum_mlx.messages import Ready


class Board:
    """Figures are put together by the report's own code, so the screen and the report cannot differ.

    Args:
        clock: seconds, monotonic.
        time_of_day: in words.

    Attributes:
        now: the run that is measured at this moment.
        said: the newest line of narration.
        moment: when the newest event came, in words.
        stopping: the user has asked for the end.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._clock, self._time_of_day = clock, time_of_day
        self._watchers: list[Callable[[], None]] = []
        self._started = self._newest = clock()
        self._begun = 0.0
        self._seconds: dict[Key, list[float]] = {}  # of the runs that were kept
        self._results = Results()
        self.ready: Ready | None = None
        self.plan: Planned | None = None
        self.now: Begun | None = None
        self.said = ""
        self.moment = time_of_day()
        self.absent: dict[str, str] = {}
        self.bandwidth = 0.0
        self.stopping = False

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Call it after each change."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def stop(self) -> None:
        self.stopping = True
        self._changed()

    def take(self, event: Event) -> None:
        self._newest, self.moment = self._clock(), self._time_of_day()
        match event:
            case Ready():
                self.ready = event
            case Planned():
                self.plan = event
            case Begun():
                self.now, self._begun = event, self._newest
            case Kept():
                self._keep(event)
            case Skipped(key, why):
                self._results.skipped[key] = why
            case Absent(peer, why):
                self.absent[peer] = why
            case Bandwidth(bytes_per_s):
                self.bandwidth = bytes_per_s
            case Check():
                self._results.note(event)
            case Said(what):
                self.said = what
        if not isinstance(event, Begun):
            self.now = None
        self._changed()

    def _keep(self, kept: Kept) -> None:
        self._results.runs.setdefault(kept.key, {})[kept.rep] = kept.figures
        self._results.methods[kept.key] = ""
        self._seconds.setdefault(kept.key, []).append(self._newest - self._begun)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher()

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.plan.rows if self.plan else ()

    @property
    def checks(self) -> list[Check]:
        return list(self._results.checks.values())

    @property
    def skipped(self) -> dict[Key, str]:
        return self._results.skipped

    def count(self, key: Key) -> int:
        """How many runs of it were kept."""
        return len(self._results.runs.get(key, ()))

    def lines(self) -> dict[Key, Line]:
        return {_key(line): line for line in self._report().lines}

    def ratios(self) -> dict[Key, Line]:
        """This engine over each other system, as far as there are pairs."""
        return {_key(line): line for line in self._report().ratios}

    def _report(self) -> Report:
        ours = self.plan.ours if self.plan else ""
        return Report(
            results=self._results, ours=ours, machine={}, engine={}, settings={}, absent=self.absent
        )

    @property
    def done(self) -> int:
        return sum(self.count(row.key) for row in self.rows)

    @property
    def total(self) -> int:
        """Of what is left out, what was kept before."""
        return self.done + sum(self._left(row) for row in self.rows)

    def _left(self, row: Row) -> int:
        return 0 if row.key in self.skipped else row.repetitions - self.count(row.key)

    @property
    def elapsed(self) -> float:
        """Seconds up to the newest event."""
        return self._newest - self._started

    @property
    def rest(self) -> float | None:
        """Seconds, by what the runs took that were kept; None before the first."""
        known = {key: fmean(seconds) for key, seconds in self._seconds.items()}
        if not known:
            return None
        typical = fmean(known.values())
        return sum(self._left(row) * known.get(row.key, typical) for row in self.rows)


def _key(line: Line) -> Key:
    return line.test, line.streams, line.system
