"""A step submitted before the result of the one before it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import IN_FLIGHT, RowSampling, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import CacheCompletion, KvSlotRequest
from ferrum_mlx.errors import ContractError
from ferrum_mlx.executor import Pending
from ferrum_mlx.model_info import ExecutorState
from ferrum_mlx.sampling import SamplingParams
from tests.contract.driver import admit, generate, item

Build = Callable[..., PagedExecutor]
A, B = list(range(5, 16)), list(range(40, 47))
HOT = RowSampling(params=SamplingParams(temperature=0.8, top_p=0.9), seed=3)


@pytest.fixture
def executor(build: Build) -> PagedExecutor:
    return build()


def launch(executor: PagedExecutor, *items: UnifiedItem) -> Pending:
    executor.reserve_kv_slots([KvSlotRequest(i.cache_id, i.pos_offset + len(i.q_tokens)) for i in items])
    pending = executor.submit(UnifiedBatch(items))
    assert hasattr(pending, "result")
    return pending


def decode(cache: int, start: int, sampling: RowSampling, position: int, **fields: Any) -> UnifiedItem:
    return item(cache, [IN_FLIGHT], start, sampling=sampling.at(position), **fields)


@pytest.mark.parametrize("sampling", [RowSampling(), HOT], ids=["greedy", "hot"])
def test_ids_are_those_of_one_step_at_a_time(executor: PagedExecutor, sampling: RowSampling) -> None:
    """B's prefill joins while A's token is in flight, in chunks; then both decode ahead, A leaves first."""
    want_a = generate(executor, A, 6, sampling=sampling)
    want_b = generate(executor, B, 5, sampling=sampling)
    a, b = admit(executor, A, "a"), admit(executor, B, "b")
    flights = [launch(executor, item(a, A, 0, sampling=sampling))]
    ids: dict[int, list[int]] = {a: [], b: []}

    def step(*items: UnifiedItem) -> None:
        flights.append(launch(executor, *items))
        for result in flights.pop(0).result():
            ids[result.cache_id] += result.token_ids

    step(decode(a, 11, sampling, 1), item(b, B[:4], 0, is_final_chunk=False))
    step(decode(a, 12, sampling, 2), item(b, B[4:], 4, sampling=sampling))
    for i in range(3):
        step(decode(b, 7 + i, sampling, 1 + i), decode(a, 13 + i, sampling, 3 + i))
    step(decode(b, 10, sampling, 4))
    for result in flights.pop().result():
        ids[result.cache_id] += result.token_ids
    assert ids == {a: want_a, b: want_b}
    for cache, prompt, name in ((a, A, "a"), (b, B, "b")):
        executor.complete_cache(CacheCompletion(name, cache, len(prompt), len(ids[cache])))
    assert executor.kv_capacity_snapshot().used_blocks == 0
    # what was computed ahead is found by its tokens
    known = [*A, *want_a[:-1]]
    assert executor.try_admit_prefill("again", [*known, 1]).num_cached_tokens == len(known) // 4 * 4  # type: ignore[union-attr]


def test_a_released_cache_is_free_at_the_result_of_the_step_that_touches_it(executor: PagedExecutor) -> None:
    a, b = admit(executor, A, "a"), admit(executor, B, "b")
    first = launch(executor, item(a, A, 0), item(b, B, 0))
    second = launch(executor, decode(a, 11, RowSampling(), 1), decode(b, 7, RowSampling(), 1))
    executor.release_cache(b)  # the first of the two results does not free it
    first.result()
    executor.complete_cache(CacheCompletion("a", a, len(A), 1))
    assert executor.kv_capacity_snapshot().used_blocks == 3 + 2
    with pytest.raises(ContractError, match="released"):
        executor.submit(UnifiedBatch((decode(a, 12, RowSampling(), 2),)))
    second.result()
    assert executor.kv_capacity_snapshot().used_blocks == 0


def test_fences_and_order(executor: PagedExecutor) -> None:
    a, b = admit(executor, A, "a"), admit(executor, B, "b")
    first = launch(executor, item(a, A, 0))
    for fence in (
        lambda: executor.preempt("a", a),
        lambda: executor.truncate_kv(a, 0),
        lambda: executor.discard_prefill(a),
    ):
        with pytest.raises(ContractError, match="in flight"):
            fence()
    second = launch(executor, decode(a, 11, RowSampling(), 1))
    with pytest.raises(ContractError, match="2 steps are in flight"):
        launch(executor, item(b, B, 0))
    with pytest.raises(ContractError, match="out of order"):
        second.result()
    (result,) = first.result()
    assert executor.status().state is ExecutorState.BUSY
    second.result()
    assert executor.status().state is ExecutorState.READY
    assert executor.kv.length(a) == 12
    assert list(executor.kv._sequences[a].tokens) == [*A, *result.token_ids]
    with pytest.raises(ContractError, match="taken twice"):
        first.result()


@pytest.mark.parametrize(
    ("before", "ahead", "message"),
    [
        (None, {"q": [IN_FLIGHT]}, "no step is"),
        ({"q": A[:4], "final": False}, {"q": [IN_FLIGHT], "start": 4}, "no token in flight"),
        ({"q": A, "verify": True}, {"q": [1], "start": 11}, "before its tokens are known"),
        ({"q": A}, {"q": [IN_FLIGHT], "start": 10}, "allowed: 11, its length"),
        ({"q": A}, {"q": [IN_FLIGHT, 1], "start": 11}, "out of range"),
        ({"q": A}, {"q": [IN_FLIGHT], "start": 11, "penalty": 1.5}, "before its tokens are known"),
    ],
)
def test_what_cannot_be_submitted_ahead(
    executor: PagedExecutor, before: Any, ahead: Any, message: str
) -> None:
    a = admit(executor, A, "a")
    executor.reserve_kv_slots([KvSlotRequest(a, 20)])

    def made(q: list[int], start: int = 0, final: bool = True, verify: bool = False, penalty: float = 1.0):
        sampling = RowSampling(params=SamplingParams(repetition_penalty=penalty))
        return item(a, q, start, is_final_chunk=final, verify=verify, sampling=sampling)

    pending = executor.submit(UnifiedBatch((made(**before),))) if before else None
    with pytest.raises(ContractError, match=message):
        executor.submit(UnifiedBatch((made(**ahead),)))
    if pending:
        pending.result()  # type: ignore[union-attr]
    assert executor.kv.length(a) == (len(before["q"]) if before else 0)


def test_a_failed_step_voids_the_one_ahead(executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = admit(executor, A, "a"), admit(executor, B, "b")
    first = launch(executor, item(a, A, 0), item(b, B, 0))
    second = launch(executor, decode(a, 11, RowSampling(), 1))
    executor.release_cache(b)  # free at the result that does not come

    def broken() -> list[Any]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(executor._flights[0], "pending", type("P", (), {"result": staticmethod(broken)})())
    with pytest.raises(RuntimeError, match="gone"):
        first.result()
    with pytest.raises(ContractError, match="before it failed"):
        second.result()
    executor.release_cache(a)
    assert executor.kv_capacity_snapshot().used_blocks == 0
    assert generate(executor, A, 3)  # and it serves on
