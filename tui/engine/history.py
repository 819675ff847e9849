"""The last minute of an engine: counters sampled as it works, and the rates between them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

SPAN = 60.0  # seconds
_LEAST_GAP = 0.2  # seconds between samples that are kept apart
_NOW = 1.0  # seconds over which the present rate is taken


@dataclass(frozen=True, slots=True)
class Sample:
    """At a time in seconds: tokens since the start, the share of KV blocks in use, whether it works."""

    time: float
    decoded: int
    prefilled: int
    kv_share: float
    busy: bool


class History:
    """Samples of SPAN seconds, at most five a second."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Take a sample; one that comes at the heels of the last takes its place."""
        samples = self.samples
        if len(samples) > 1 and sample.time - samples[-2].time < _LEAST_GAP:
            samples.pop()
        elif samples and not samples[-1].busy:  # it was not sampled since, as nothing changed
            started = max(samples[-1].time, sample.time - _LEAST_GAP)
            samples.append(replace(samples[-1], time=started))
        samples.append(sample)
        while len(samples) > 2 and samples[1].time < sample.time - SPAN:
            samples.popleft()

    @property
    def now_tps(self) -> float:
        """Output tokens a second, over the last second."""
        if len(self.samples) < 2:
            return 0.0
        end = self.samples[-1].time
        return self._rates([(max(self.samples[0].time, end - _NOW), end)], "decoded")[0]

    @property
    def average_tps(self) -> float:
        """Output tokens a second of the last minute, over the time in which there were some."""
        tokens, seconds = 0, 0.0
        samples = list(self.samples)
        for before, after in pairwise(samples):
            if after.decoded > before.decoded:
                tokens += after.decoded - before.decoded
                seconds += after.time - before.time
        return tokens / seconds if seconds else 0.0

    def decode_rates(self, count: int) -> list[float]:
        """Output tokens a second in each of `count` equal parts of the last minute, oldest first."""
        return self._rates(self._parts(count), "decoded")

    def prefill_rates(self, count: int) -> list[float]:
        return self._rates(self._parts(count), "prefilled")

    def kv_shares(self, count: int) -> list[float]:
        """The share of KV blocks in use at the end of each part."""
        samples = list(self.samples)
        times = [sample.time for sample in samples]
        found = [bisect_right(times, end) for _, end in self._parts(count)]
        return [samples[i - 1].kv_share if i else 0.0 for i in found]

    def _parts(self, count: int) -> list[tuple[float, float]]:
        end = self.samples[-1].time if self.samples else 0.0
        length = SPAN / count
        return [(end - (count - i) * length, end - (count - i - 1) * length) for i in range(count)]

    def _rates(self, parts: list[tuple[float, float]], counter: str) -> list[float]:
        samples = list(self.samples)
        times = [sample.time for sample in samples]
        counts = [getattr(sample, counter) for sample in samples]
        return [
            (_at(end, times, counts) - _at(start, times, counts)) / (end - start) if end > start else 0.0
            for start, end in parts
        ]


def _at(time: float, times: list[float], counts: list[int]) -> float:
    """A counter at any time, on straight lines between its samples."""
    i = bisect_right(times, time)
    if i == 0:
        return float(counts[0]) if counts else 0.0
    if i == len(times):
        return float(counts[-1])
    part = (time - times[i - 1]) / (times[i] - times[i - 1])
    return counts[i - 1] + part * (counts[i] - counts[i - 1])
