"""Plain data: what is derived in it, and that all of it crosses to another process."""

from __future__ import annotations

import pickle

import pytest

from ferrum_mlx.errors import ContractError
from ferrum_mlx.messages import Answered, Ask, AskKVMap, Finished, Notice, Stepped
from ferrum_mlx.metrics import (
    CACHED,
    FREE,
    ITL_BOUNDS,
    NO_CACHE,
    CacheMetrics,
    KVMap,
    KVUsage,
    Latencies,
    RequestStats,
    StepStats,
    Timings,
    Usage,
)

KV = KVUsage(16, total_blocks=10, used_blocks=4, shared_blocks=1, cached_blocks=3)
STATS = RequestStats(
    request_id="r",
    priority=1,
    finish_reason="stop",
    arrived=1e9,
    queue_s=0.1,
    prefill_s=0.2,
    decode_s=0.3,
    e2e_s=0.6,
    usage=Usage(5, 6, 1),
    timings=Timings(0.3, 25.0, 20.0),
    itl=Latencies(count=5, total=0.3),
    preemptions=2,
    replayed_tokens=9,
)


def test_cached_blocks_are_free() -> None:
    assert KV.free_blocks == 6


@pytest.mark.parametrize(("hits", "misses", "rate"), [(0, 0, 0.0), (0, 3, 0.0), (3, 1, 0.75)])
def test_hit_rate(hits: int, misses: int, rate: float) -> None:
    assert CacheMetrics(enabled=True, block_size=16, kv_dtype="x", hits=hits, misses=misses).hit_rate == rate


def test_before_the_first_step_everything_is_zero() -> None:
    stats = StepStats(kv=KV)
    assert (stats.step, stats.seconds, stats.running, stats.cache) == (0, 0.0, 0, NO_CACHE)
    assert (NO_CACHE.enabled, NO_CACHE.hit_rate) == (False, 0.0)


def test_no_gap_is_in_no_bucket() -> None:
    assert Latencies().buckets == (0,) * (len(ITL_BOUNDS) + 1)
    assert list(ITL_BOUNDS) == sorted(set(ITL_BOUNDS))


def test_the_end_of_a_request_says_what_its_stats_say() -> None:
    end = Finished("r", STATS)
    assert (end.finish_reason, end.usage, end.timings) == ("stop", STATS.usage, STATS.timings)


@pytest.mark.parametrize(
    "message",
    [
        Finished("r", STATS),
        Stepped(StepStats(kv=KV)),
        Ask(1, AskKVMap()),
        Answered(1, KVMap(("full",), ((FREE, CACHED, 2),))),
        Notice("words"),
    ],
)
def test_messages_cross_to_another_process(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_an_error_in_place_of_a_map_crosses_too() -> None:
    answer = pickle.loads(pickle.dumps(Answered(1, ContractError("what", "allowed")))).answer
    assert (type(answer), str(answer)) == (ContractError, "what; allowed")
