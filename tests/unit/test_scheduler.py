"""Who gets how many tokens, and who is preempted."""

from __future__ import annotations

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.batch import UnifiedBatch, UnifiedItem
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.request import Request, RequestState
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.scheduler import Scheduled, Scheduler


class Bench:
    """A scheduler whose plans are carried out, one token sampled where a plan catches up."""

    def __init__(self, blocks: int = 100, **settings: int) -> None:
        config = EngineConfig(block_size=4, max_model_len=200, kv_memory=blocks * 16, **settings)
        self.executor = FakeExecutor(config)
        self.scheduler = Scheduler(self.executor, config)

    def add(self, name: str, prompt: int) -> Request:
        request = Request(name, [1] * prompt, SamplingParams(), seed=0, max_tokens=100)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        plan = self.scheduler.schedule()
        if plan:
            self.executor.unified_decode(UnifiedBatch(tuple(_item(s) for s in plan)))
        for scheduled in plan:
            request = scheduled.request
            request.num_computed_tokens += scheduled.num_tokens
            if request.num_computed_tokens == request.num_tokens:
                request.output.append(7)
        return {scheduled.request.request_id: scheduled.num_tokens for scheduled in plan}


def _item(scheduled: Scheduled) -> UnifiedItem:
    request, start = scheduled.request, scheduled.request.num_computed_tokens
    assert request.cache_id is not None
    return UnifiedItem(
        cache_id=request.cache_id,
        q_tokens=request.tokens(start, start + scheduled.num_tokens),
        pos_offset=start,
    )


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
    while b.state is RequestState.RUNNING:
        bench.step()
    assert a.state is RequestState.RUNNING
    assert (b.state, b.num_computed_tokens, b.cache_id) == (RequestState.PREEMPTED, 0, None)
    assert list(bench.scheduler.waiting) == [b, c]
    assert len(b.output) > 1  # it keeps what it said
    bench.scheduler.finish(a, completed=True)
    plan = bench.step()
    assert plan["b"] == b.num_tokens - 1  # its prompt and its output, computed again
    assert bench.scheduler.preemptions == 1


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
    assert "1 to 8" in str(error)
    assert bench.scheduler.take_rejected() == []


def test_a_deferral_that_nothing_can_end_is_a_rejection() -> None:
    """Else the engine would ask again and again."""
    bench = Bench(blocks=4)
    bench.executor.kv.create(promised_len=16)  # a leak, as a faulty backend might have
    bench.add("a", 8)
    assert bench.step() == {}
    assert not bench.scheduler.has_work()
    assert "nothing runs" in str(bench.scheduler.take_rejected()[0][1])


def test_finish_takes_a_request_out_of_any_state() -> None:
    bench = Bench(blocks=5)
    requests = [bench.add(name, 8) for name in "abc"]
    for _ in range(6):
        bench.step()
    assert {r.state for r in requests} == {RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING}
    for request in requests:
        bench.scheduler.finish(request, completed=False)
    assert not bench.scheduler.has_work()
    assert bench.executor.kv_capacity_snapshot().used_blocks == 0
