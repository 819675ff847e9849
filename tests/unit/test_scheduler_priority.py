"""Who goes first, who makes way, and who waits for a prefix that another computes."""

from __future__ import annotations

import pytest

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.scheduler import Scheduler

from .scheduler_bench import PREEMPTED, RUNNING, WAITING, Bench

# Priorities


def test_a_lower_number_is_admitted_first_and_gets_the_budget_first() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("late", 12, priority=5)
    bench.add("soon", 12, priority=-1)
    bench.add("soon too", 12, priority=-1)
    assert bench.step() == {"soon": 12, "soon too": 4}


def test_an_urgent_request_takes_the_seat_of_one_that_is_not() -> None:
    bench = Bench(max_num_seqs=2)
    idle, busy = bench.add("idle", 6, priority=2), bench.add("busy", 6, priority=1)
    bench.step()
    urgent = bench.add("urgent", 6)
    assert "urgent" in bench.step()
    assert (idle.state, busy.state, urgent.state) == (PREEMPTED, RUNNING, RUNNING)
    equal = bench.add("equal", 6, priority=1)
    bench.step()
    assert equal.state is WAITING


def test_an_urgent_request_takes_the_blocks_of_those_that_are_not_if_that_is_enough() -> None:
    bench = Bench(blocks=10)
    idle = bench.add("idle", 20, priority=1)
    bench.step()
    urgent = bench.add("urgent", 28)
    bench.step()
    assert (idle.state, urgent.state) == (PREEMPTED, RUNNING)
    bench = Bench(blocks=10)
    equal, idle = bench.add("equal", 20), bench.add("idle", 4, priority=1)
    bench.step()
    bench.add("urgent", 28)
    bench.step()
    assert (equal.state, idle.state) == (RUNNING, RUNNING)  # it would not have helped


def test_nobody_overtakes_one_who_waits_for_blocks() -> None:
    bench = Bench(blocks=8)
    first = bench.add("first", 16)
    bench.step()
    big, small = bench.add("big", 20), bench.add("small", 4)
    for _ in range(3):
        assert bench.step() == {"first": 1}
    bench.scheduler.finish(first, completed=True)
    assert bench.step() == {"big": 20, "small": 4}
    assert big.state is small.state is RUNNING


def test_one_replay_never_makes_another_necessary() -> None:
    bench = Bench(max_num_seqs=1, max_prefill_chunk=2, prefix_cache=False)
    low = bench.add("low", 8, priority=1)
    bench.step_until(lambda: low.num_computed_tokens == 8)
    bench.scheduler._preempt(bench.scheduler._running)
    bench.step()
    urgent = bench.add("urgent", 4)
    urgent.lost_tokens = 2  # as if it had been preempted, too
    while low.is_recomputing:
        assert bench.step() == {"low": 2}
    assert bench.step() == {"urgent": 2}


def test_a_seat_is_not_taken_for_one_who_would_lack_blocks_then() -> None:
    bench = Bench(blocks=10, max_num_seqs=2)
    bench.add("equal", 20)
    idle = bench.add("idle", 4, priority=1)
    bench.step()
    urgent = bench.add("urgent", 28)
    bench.step()
    assert (idle.state, urgent.state) == (RUNNING, WAITING)


@pytest.mark.parametrize("seats", [1, 8])
def test_a_seat_is_taken_whether_the_executor_has_another_or_not(seats: int) -> None:
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=8)
    bench.executor._max_seqs = seats
    bench.scheduler = Scheduler(bench.executor, EngineConfig(max_num_seqs=1))
    idle = bench.add("idle", 6, priority=1)
    bench.step()
    urgent = bench.add("urgent", 6)
    assert bench.step() == {"urgent": 6}
    assert (idle.state, urgent.state, bench.executor.cache_metrics().misses) == (PREEMPTED, RUNNING, 2)


def test_nobody_makes_way_for_one_who_waits_for_its_prefix() -> None:
    bench = Bench(max_prefill_chunk=8)
    bench.add("first", [9] * 30)
    idle = bench.add("idle", 4, priority=1)
    bench.step()
    twin = bench.add("twin", [9] * 30)
    bench.step()
    assert (twin.state, idle.state) == (WAITING, RUNNING)
    bench.step_until(lambda: twin.state is RUNNING)
    assert (twin.num_cached_tokens, idle.preemptions) == (28, 0)


def test_whose_blocks_are_all_shared_still_has_a_seat_to_give() -> None:
    bench = Bench(max_num_seqs=8)
    bench.scheduler = Scheduler(bench.executor, EngineConfig(max_num_seqs=1))
    idle = bench.add("idle", [9] * 7, priority=1)
    bench.step_until(lambda: idle.num_computed_tokens == 8)
    urgent = bench.add("urgent", [*[9] * 7, 7, 7])
    assert bench.step() == {"urgent": 1}  # it found all that idle has
    assert (idle.state, urgent.num_cached_tokens) == (PREEMPTED, 8)


# Shared prefixes


def test_twins_that_arrive_together_compute_their_prompt_once() -> None:
    bench = Bench()
    first, second = bench.add("first", [9] * 30), bench.add("second", [9] * 30)
    other = bench.add("other", 5)
    assert bench.step() == {"first": 30, "other": 5}  # who shares nothing does not wait
    assert bench.step() == {"first": 1, "other": 1, "second": 2}
    assert (second.num_cached_tokens, first.num_cached_tokens, other.num_cached_tokens) == (28, 0, 0)


def test_a_twin_gets_on_when_the_one_it_waits_for_is_gone() -> None:
    bench = Bench(max_prefill_chunk=8)
    first, second = bench.add("first", [9] * 30), bench.add("second", [9] * 30)
    bench.step()
    bench.scheduler.finish(first, completed=False)
    assert bench.step() == {"second": 8}
    assert second.num_cached_tokens == 8


def test_a_prefill_is_short_while_anything_decodes() -> None:
    bench = Bench(prefill_while_decoding=5)
    bench.add("a", 12)
    assert bench.step() == {"a": 12}
    bench.add("b", 12)
    bench.add("c", 12)
    assert bench.step() == {"a": 1, "b": 5}
    assert bench.step() == {"a": 1, "b": 5}
    assert bench.step() == {"a": 1, "b": 2, "c": 3}


def test_a_waiting_request_is_not_probed_again_before_something_is_released() -> None:
    bench = Bench(blocks=5)
    a = bench.add("a", 12)
    bench.step()
    bench.add("b", 12)
    probes: list[str] = []
    probe = bench.executor.try_admit_prefill
    bench.executor.try_admit_prefill = lambda name, *args, **fields: (  # type: ignore[method-assign]
        probes.append(name),
        probe(name, *args, **fields),
    )[1]
    for _ in range(4):
        bench.step()
    assert probes == ["b"]
    bench.scheduler.finish(a, completed=True)
    assert bench.step() == {"b": 12}
