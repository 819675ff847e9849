"""Numbers of a request, on a clock that the test holds."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ferrum_mlx.metrics import ITL_BOUNDS, Latencies, Timings, Usage
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.timing import RequestTimer, latencies

USAGE = Usage(prompt_tokens=30, completion_tokens=3, cached_tokens=10)


def request(**facts: int) -> Request:
    return Request("r", [1] * 30, SamplingParams(), seed=0, max_tokens=10, **facts)


def test_queue_prefill_and_decode_are_apart() -> None:
    timer = RequestTimer(100.0)
    timer.scheduled(102.0)
    timer.scheduled(103.0)  # a second chunk: prefill started at 102
    for now in (104.0, 104.5, 106.0):
        timer.token(now)
    stats = timer.stats(request(priority=2, preemptions=1, replayed_tokens=7), USAGE, "length", 106.5)
    assert (stats.queue_s, stats.prefill_s, stats.decode_s, stats.e2e_s) == (2.0, 2.0, 2.0, 6.5)
    assert stats.timings == Timings(ttft_s=4.0, prefill_tps=10.0, decode_tps=1.0)
    assert (stats.itl.count, stats.itl.total, stats.itl.p50, stats.itl.max) == (2, 2.0, 0.5, 1.5)
    assert (stats.priority, stats.preemptions, stats.replayed_tokens) == (2, 1, 7)
    assert (stats.request_id, stats.finish_reason, stats.usage) == ("r", "length", USAGE)


def test_one_token_has_no_decode_speed() -> None:
    timer = RequestTimer(100.0)
    timer.scheduled(101.0)
    timer.token(102.0)
    assert timer.timings(Usage(30, 1, 0)) == Timings(ttft_s=2.0, prefill_tps=30.0, decode_tps=0.0)


@pytest.mark.parametrize(("scheduled", "queue_s"), [(None, 0.0), (103.0, 3.0)])
def test_what_it_did_not_get_to_is_zero(scheduled: float | None, queue_s: float) -> None:
    timer = RequestTimer(100.0)
    if scheduled is not None:
        timer.scheduled(scheduled)
    stats = timer.stats(request(), Usage(30, 0, 0), "abort", 104.0)
    assert (stats.queue_s, stats.prefill_s, stats.decode_s, stats.e2e_s) == (queue_s, 0.0, 0.0, 4.0)
    assert (stats.timings, stats.itl) == (Timings(0.0, 0.0, 0.0), Latencies())


def test_arrival_is_told_as_time_of_day() -> None:
    before = time.time()
    timer = RequestTimer(time.perf_counter())
    stats = timer.stats(request(), USAGE, "stop", time.perf_counter())
    assert before - 1 <= stats.arrived <= time.time() + 1


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_latencies_are_numpy_s(count: int) -> None:
    gaps = np.random.default_rng(count).exponential(0.1, count)
    found = latencies(gaps.tolist())
    assert found.count == count
    assert found.total == pytest.approx(gaps.sum())
    assert found.p50 == np.percentile(gaps, 50, method="inverted_cdf")
    assert found.p99 == np.percentile(gaps, 99, method="inverted_cdf")
    assert found.max == gaps.max()
    edges = [-np.inf, *np.nextafter(ITL_BOUNDS, np.inf), np.inf]  # a bucket holds its upper end
    assert found.buckets == tuple(np.histogram(gaps, edges)[0])


def test_a_gap_on_a_bound_is_in_its_bucket() -> None:
    assert latencies([ITL_BOUNDS[2]]).buckets.index(1) == 2
    assert latencies([ITL_BOUNDS[-1] * 2]).buckets[-1] == 1
