"""How long a step takes by its number of rows, learned from the steps themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

ROW = 0.1  # of a step of one row: what a further row is taken to cost until that is known
ANY = 0.5  # and what the second one costs besides: products of one row have kernels of their own
WINDOW = 16  # latest steps of a number of rows that count
SOUND = 4  # steps after which an estimate is not doubted
PATIENCE = 32  # steps after which one that is no such is forgotten, to be made again
LEAST_PLAIN = 2  # steps without drafts before anything is planned
REFRESH = 64  # steps after which one without drafts is due: a machine gets busy, a context long


@dataclass(slots=True)
class _Samples:
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    at: int = 0  # the step of the last one


class StepCost:
    """Of steps with one number of sequences; rows beyond it are drafts.

    A low quantile of the latest ones is robust to what else the machine did meanwhile, and since more
    rows never cost less, that of each number of rows is a bound on those of fewer. An estimate from few
    steps is doubted: it counts no more than as many rows in steps without drafts, and is soon forgotten.
    """

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self._samples: dict[int, _Samples] = {}
        self._steps = 0
        self._bounds: list[tuple[int, float]] = [(sequences, 1.0)]  # rows, seconds: rising

    @property
    def needs_plain(self) -> bool:
        """A step without drafts is due, to compare with."""
        plain = self._samples.get(self.sequences)
        return plain is None or len(plain.latest) < LEAST_PLAIN or self._steps - plain.at >= REFRESH

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return self._bounds[0][1]

    def add(self, rows: int, seconds: float) -> None:
        self._steps += 1
        samples = self._samples.setdefault(rows, _Samples())
        samples.latest.append(seconds)
        samples.at = self._steps
        self._forget()
        bound, self._bounds = float("inf"), []
        for known in sorted(self._samples, reverse=True):
            bound = min(bound, self._typical(known))
            self._bounds.insert(0, (known, bound))
        if self._bounds[0][0] != self.sequences:
            self._bounds.insert(0, (self.sequences, bound / self._shape(self._bounds[0][0])))

    def seconds(self, rows: int) -> float:
        """Between known numbers of rows on a line, outside of them by what is assumed."""
        bounds = self._bounds
        index = next((i for i, (known, _) in enumerate(bounds) if known >= rows), len(bounds))
        if index < len(bounds) and (bounds[index][0] == rows or index > 1):
            (a, start), (b, end) = bounds[max(0, index - 1)], bounds[index]
            return end if rows == b else start + (end - start) * (rows - a) / (b - a)
        known, seconds = bounds[min(index, len(bounds) - 1)]
        return seconds * self._shape(rows) / self._shape(known)

    def _shape(self, rows: int) -> float:
        """In steps of one row, by what is assumed."""
        return 1 + ROW * (rows - 1) + (ANY if rows > 1 else 0)

    def _typical(self, rows: int) -> float:
        latest = self._samples[rows].latest
        plain = self._samples.get(self.sequences)
        if len(latest) >= SOUND or plain is None:
            return typical(latest)
        return min(typical(latest), typical(plain.latest) * -(-rows // self.sequences))

    def _forget(self) -> None:
        old = self._steps - PATIENCE
        doubtful = [
            rows
            for rows, samples in self._samples.items()
            if rows != self.sequences and len(samples.latest) < SOUND and samples.at < old
        ]
        for rows in doubtful:
            del self._samples[rows]


def typical(values: Collection[float]) -> float:
    """The lower quartile: what disturbs a step only ever makes it longer."""
    return sorted(values)[(len(values) - 1) // 4]
