"""When things happened to a request, and what its users make of that: queue, TTFT, ITL, speeds."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from ferrum_mlx.metrics import ITL_BOUNDS, Latencies, RequestStats, Timings, Usage
from ferrum_mlx.request import Request


class RequestTimer:
    """Moments of one request. All are seconds of `time.perf_counter`, given by the caller."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self._epoch = time.time() - time.perf_counter()  # to turn a moment into a time of day
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token = 0.0
        self._gaps = array("d")  # 8 bytes a token

    def scheduled(self, now: float) -> None:
        """A step has a part of the request; the first such call counts."""
        if self._scheduled is None:
            self._scheduled = now

    def token(self, now: float) -> None:
        """A token was sampled; one appended value, whatever came before."""
        if self._first_token is None:
            self._first_token = now
        else:
            self._gaps.append(now - self._last_token)
        self._last_token = now

    @property
    def ttft_s(self) -> float:
        return _between(self.arrived, self._first_token)

    def pace(self, now: float, computed: int) -> float:
        """Tokens a second: of the output behind its first; before that, of the prompt's `computed` ones."""
        if self._first_token is None:
            return _rate(computed, _between(self._scheduled, now))
        return _rate(len(self._gaps), self._decode_s)

    def latest_gaps(self, count: int) -> array[float]:
        return self._gaps[-count:]

    def timings(self, usage: Usage) -> Timings:
        return Timings(
            ttft_s=self.ttft_s,
            prefill_tps=_rate(usage.prompt_tokens - usage.cached_tokens, self._prefill_s),
            decode_tps=_rate(usage.completion_tokens - 1, self._decode_s),
        )

    def stats(self, request: Request, usage: Usage, finish_reason: str, now: float) -> RequestStats:
        """All of it, at the request's end."""
        return RequestStats(
            request_id=request.request_id,
            priority=request.priority,
            finish_reason=finish_reason,
            arrived=self._epoch + self.arrived,
            queue_s=_between(self.arrived, self._scheduled),
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            e2e_s=now - self.arrived,
            usage=usage,
            timings=self.timings(usage),
            itl=latencies(self._gaps),
            preemptions=request.preemptions,
            replayed_tokens=request.replayed_tokens,
            drafted_tokens=request.num_drafted,
            accepted_tokens=request.num_accepted,
            verifies=request.num_verifies,
            adapter=request.adapter,
        )

    @property
    def _prefill_s(self) -> float:
        return _between(self._scheduled, self._first_token)

    @property
    def _decode_s(self) -> float:
        return _between(self._first_token, self._last_token)


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start


def latencies(gaps: Sequence[float]) -> Latencies:
    """Sort once, at the end of a request."""
    if not gaps:
        return Latencies()
    ordered = sorted(gaps)
    up_to = [0, *(bisect_right(ordered, bound) for bound in ITL_BOUNDS), len(ordered)]
    return Latencies(
        count=len(ordered),
        total=sum(ordered),
        p50=_percentile(ordered, 50),
        p99=_percentile(ordered, 99),
        max=ordered[-1],
        buckets=tuple(end - start for start, end in pairwise(up_to)),
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least that share of the values do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
