"""Who gets how many tokens, and who is preempted."""

from __future__ import annotations

import pytest

from ferrum_mlx.capacity import KvSlotRequest

from .scheduler_bench import PREEMPTED, RUNNING, WAITING, Bench


def test_decodes_first_then_arrivals_in_order_within_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=20)
    for name, prompt in (("a", 5), ("b", 30), ("c", 4)):
        bench.add(name, prompt)
    assert bench.step() == {"a": 5, "b": 15}
    assert bench.step() == {"a": 1, "b": 15, "c": 4}
    assert list(bench.step()) == ["a", "b", "c"]


def test_a_chunk_is_no_longer_than_allowed() -> None:
    bench = Bench(max_prefill_chunk=6)
    bench.add("a", 10)
    bench.add("b", 3)
    assert bench.step() == {"a": 6, "b": 3}
    assert bench.step() == {"b": 1, "a": 4}


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=2)
    first = [bench.add(name, 3) for name in "abc"]
    assert list(bench.step()) == ["a", "b"]
    bench.scheduler.finish(first[0], completed=True)
    assert list(bench.step()) == ["b", "c"]


def test_the_latest_arrival_is_preempted_and_comes_back_before_newer_ones() -> None:
    bench = Bench(blocks=6)
    a, b = bench.add("a", 8), bench.add("b", 8)
    bench.step()
    c = bench.add("c", 4)
    bench.step_until(lambda: b.state is PREEMPTED)
    assert a.state is RUNNING
    assert (b.num_computed_tokens, b.cache_id) == (0, None)
    assert (bench.scheduler.num_waiting, bench.scheduler.num_preempted) == (2, 1)
    assert len(b.output) > 1  # it keeps what it said
    while b.state is PREEMPTED and len(a.output) < 12:
        assert "c" not in bench.step()  # nobody overtakes it
    bench.scheduler.finish(a, completed=True)
    plan = bench.step()
    assert plan["b"] > 1  # computed again, as far as its blocks have been evicted
    assert c.state is RUNNING
    assert bench.scheduler.preemptions == b.preemptions == 1
    assert b.num_cached_tokens == 0  # what it finds of its own is no saving


def test_nobody_is_admitted_into_blocks_promised_to_a_prompt_in_chunks() -> None:
    bench = Bench(blocks=10, max_prefill_chunk=8)
    bench.add("long", 32)  # 8 of 10 blocks, 2 a step
    bench.add("next", 16)
    for _ in range(4):
        assert bench.step() == {"long": 8}
    assert bench.scheduler.preemptions == 0


def test_what_can_never_fit_is_handed_out_once() -> None:
    bench = Bench(blocks=2)
    bench.add("big", 9)
    bench.add("small", 3)
    assert bench.step() == {"small": 3}
    ((request, error),) = bench.scheduler.take_rejected()
    assert request.request_id == "big"
    bench.scheduler.finish(request, completed=False)
    assert "1 to 8" in str(error)
    assert bench.scheduler.take_rejected() == []


def test_a_deferral_that_nothing_can_end_is_a_rejection() -> None:
    """Else the engine would ask again and again."""
    bench = Bench(blocks=4)
    bench.executor.kv.create(promised_len=16)  # a leak, as a faulty backend might have
    bench.add("a", 8)
    assert bench.step() == {}
    ((request, error),) = bench.scheduler.take_rejected()
    assert "nothing runs" in str(error)
    bench.scheduler.finish(request, completed=False)
    assert not bench.scheduler.has_work()


def test_finish_takes_a_request_out_of_any_state() -> None:
    bench = Bench(blocks=5)
    requests = [bench.add(name, 8) for name in "abc"]
    bench.step_until(lambda: {r.state for r in requests} == {RUNNING, PREEMPTED, WAITING})
    for request in requests:
        bench.scheduler.finish(request, completed=False)
    assert not bench.scheduler.has_work()
    assert bench.executor.kv_capacity_snapshot().used_blocks == 0


# Victims


def test_the_victim_is_the_cheapest_to_compute_again_not_the_latest() -> None:
    bench = Bench(blocks=10)
    short, long = bench.add("short", 4), bench.add("long", 20)
    bench.step_until(lambda: bench.scheduler.preemptions == 1)
    assert (short.state, long.state) == (PREEMPTED, RUNNING)


def test_the_victim_is_of_the_lowest_priority_however_dear() -> None:
    bench = Bench(blocks=10)
    dear, cheap = bench.add("dear", 20, priority=1), bench.add("cheap", 4, priority=0)
    bench.step_until(lambda: bench.scheduler.preemptions == 1)
    assert (dear.state, cheap.state) == (PREEMPTED, RUNNING)


def test_whose_blocks_are_all_shared_is_no_victim() -> None:
    """Releasing them would free nothing."""
    bench = Bench(blocks=8)
    shared = bench.add("shared", [9] * 5)
    bench.step()
    twin = bench.add("twin", [9] * 5)
    other = bench.add("other", 8)
    bench.step()
    assert twin.num_cached_tokens == 4
    bench.executor.kv.truncate(shared.cache_id, 4)  # as a rejected draft would: only shared blocks are left
    shared.num_computed_tokens, shared.output = 4, []
    assert bench.executor.releasable_blocks(shared.cache_id) == 0
    assert bench.scheduler.relieve()
    assert shared.state is RUNNING
    assert PREEMPTED in (twin.state, other.state)


def test_prefills_wait_before_anyone_is_evicted() -> None:
    bench = Bench(blocks=8, max_prefill_chunk=4)
    bench.add("decoding", 12)
    bench.step_until(lambda: bench.scheduler.num_running == 1 and "decoding" in bench.step())
    late = bench.add("late", 12)
    bench.step_until(lambda: late.state is RUNNING)
    bench.executor.kv.create(0)
    while bench.scheduler.preemptions == 0 and late.num_computed_tokens < 12:
        bench.step()
    assert bench.scheduler.preemptions == 0


def test_a_prefill_waits_however_small_its_chunks() -> None:
    bench = Bench(blocks=8, max_prefill_chunk=1)
    decoding = bench.add("decoding", 12)
    bench.step_until(lambda: decoding.num_computed_tokens == 18)
    late = bench.add("late", 8)
    bench.step()
    bench.executor.kv.reserve([KvSlotRequest(bench.executor.kv.create(), 4)])  # takes a block it was promised
    bench.step_until(lambda: late.num_computed_tokens == 4)
    assert bench.step() == {"decoding": 1}
    assert (bench.scheduler.preemptions, late.state) == (0, RUNNING)


@pytest.mark.parametrize("prompts", [(8, 4), (4, 8)])
def test_who_made_room_waits_for_an_end_though_there_seems_to_be_room(prompts: tuple[int, int]) -> None:
    bench = Bench()
    a, b = bench.add("a", prompts[0]), bench.add("b", prompts[1])
    bench.step()
    assert bench.scheduler.relieve()  # a backend had no room for the two
    stays, goes = (a, b) if prompts[0] > prompts[1] else (b, a)
    assert goes.state is PREEMPTED
    assert [bench.step() for _ in range(3)] == [{stays.request_id: 1}] * 3
    bench.scheduler.finish(stays, completed=True)
    assert list(bench.step()) == [goes.request_id]


def test_an_end_that_frees_nothing_brings_nobody_back() -> None:
    bench = Bench(blocks=6)
    a, b = bench.add("a", 8), bench.add("b", 8)
    bench.step_until(lambda: b.state is PREEMPTED)
    ends = bench.scheduler._ends
    bench.scheduler.finish(bench.add("c", 4), completed=False)  # cancelled while it waited
    assert bench.scheduler._ends == ends
    bench.scheduler.finish(a, completed=True)
    assert bench.scheduler._ends == ends + 1


def test_replays_are_what_was_computed_again_even_if_it_is_lost_again() -> None:
    bench = Bench(max_prefill_chunk=3, prefix_cache=False)
    a = bench.add("a", 9)
    bench.step_until(lambda: a.num_computed_tokens == 10)
    for _ in range(2):
        bench.scheduler._preempt(bench.scheduler._running)
        bench.step()
    assert (a.num_computed_tokens, a.replayed_tokens) == (3, 6)
    bench.step_until(lambda: a.num_computed_tokens > 12)
    assert a.replayed_tokens == 3 + 10


def test_a_preempted_request_does_not_come_and_go_while_others_only_grow() -> None:
    bench = Bench(blocks=12)
    requests = [bench.add(name, 8) for name in "abc"]
    bench.step_until(lambda: max(r.num_tokens for r in requests) > 38)
    assert bench.scheduler.preemptions == 2  # each once: they wait for an end


def test_equal_requests_on_a_pool_for_one_all_get_to_their_ends() -> None:
    bench = Bench(blocks=8)
    requests = [bench.add(str(i), 6, priority=i % 2) for i in range(5)]
    unfinished = list(requests)
    for _ in range(400):
        bench.step()
        for request in [r for r in unfinished if len(r.output) >= 20]:
            bench.scheduler.finish(request, completed=True)
            unfinished.remove(request)
    assert not unfinished
    assert bench.executor.kv_capacity_snapshot().used_blocks == 0
