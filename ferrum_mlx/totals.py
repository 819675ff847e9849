"""Sums over an engine's life, kept by its client out of the events it gets anyway."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from ferrum_mlx.metrics import ITL_BOUNDS, Latencies, RequestStats, StepStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LATEST = 256  # requests whose TTFT is kept as it was
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts of values up to each bound and above the one before; the last count is above them all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, latencies: Latencies) -> None:
        """Take in gaps that were counted by the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, latencies.buckets, strict=True)]
        self.total += latencies.total


class Totals:
    """Requests count when they end; tokens and steps as they happen."""

    def __init__(self) -> None:
        self.last_step: StepStats | None = None
        self.ended: Counter[str] = Counter()  # by finish reason
        self.prompt_tokens = self.generated_tokens = 0
        self.decode_tokens = 0
        self.last_request: RequestStats | None = None  # that has output tokens
        self.latest_ttft_s: deque[float] = deque(maxlen=_LATEST)
        self.prefill_tokens = self.admitted_tokens = self.cached_tokens = self.replayed_tokens = 0
        self.step_tokens, self.step_s = Histogram(_TOKENS), Histogram(_SECONDS)
        self.request_prompt_tokens, self.request_output_tokens = Histogram(_TOKENS), Histogram(_TOKENS)
        self.ttft_s, self.itl_s, self.e2e_s = Histogram(_SECONDS), Histogram(ITL_BOUNDS), Histogram(_SECONDS)
        self.queue_s, self.prefill_s, self.decode_s = (Histogram(_SECONDS) for _ in range(3))

    def add_tokens(self, count: int) -> None:
        self.generated_tokens += count

    def add_step(self, step: StepStats) -> None:
        self.last_step = step
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += step.decode_tokens
        self.admitted_tokens += step.admitted_tokens
        self.cached_tokens += step.cached_tokens
        if tokens := step.prefill_tokens + step.decode_tokens:
            self.step_tokens.add(tokens)
            self.step_s.add(step.seconds)

    def add_failure(self) -> None:
        self.ended["error"] += 1

    def add_request(self, stats: RequestStats) -> None:
        self.ended[stats.finish_reason] += 1
        self.prompt_tokens += stats.usage.prompt_tokens
        self.replayed_tokens += stats.replayed_tokens
        self.request_prompt_tokens.add(stats.usage.prompt_tokens)
        self.request_output_tokens.add(stats.usage.completion_tokens)
        self.e2e_s.add(stats.e2e_s)
        if stats.usage.completion_tokens:  # the others have no such times
            self.last_request = stats
            self.latest_ttft_s.append(stats.timings.ttft_s)
            self.ttft_s.add(stats.timings.ttft_s)
            self.queue_s.add(stats.queue_s)
            self.prefill_s.add(stats.prefill_s)
            self.decode_s.add(stats.decode_s)
            self.itl_s.merge(stats.itl)
