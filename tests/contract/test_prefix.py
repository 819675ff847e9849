"""Shared prefixes, preemption and the outcomes of a submission, on every backend."""

from __future__ import annotations

import threading

import pytest

from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.capacity import Admitted, CacheCompletion, Deferred, KvSlotRequest, NotSubmitted
from ferrum_mlx.errors import CapacityError, ContractError, FerrumError

from .conftest import Build
from .driver import admit, generate, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140]


def test_a_hit_computes_what_a_miss_computes(build: Build) -> None:
    cold = generate(build(prefix_cache=False), PROMPT, 8)
    executor = build()
    for _ in range(2):
        assert generate(executor, PROMPT, 8, use_prefix=True) == cold
    metrics = executor.cache_metrics()
    assert (metrics.hits, metrics.misses, metrics.saved_prefill_tokens) == (1, 1, 12)
    assert metrics.entries == 5  # 20 of 21 positions were computed
    assert metrics.bytes == 5 * 4 * executor.memory().kv_bytes_per_token
    assert executor.kv_capacity_snapshot().used_blocks == 0


def test_a_hit_beside_the_sequence_it_shares_with(build: Build) -> None:
    """Both go on in their own blocks; the shared ones are counted, and nobody frees them."""
    cold = generate(build(), [*PROMPT, 1, 2], 6)
    executor = build()
    first = admit(executor, PROMPT, "first")
    run(executor, item(first, PROMPT, 0))
    admission = executor.try_admit_prefill("second", [*PROMPT, 1, 2])
    assert isinstance(admission, Admitted)
    assert admission.num_cached_tokens == 12
    second = admission.cache_id
    token = run(executor, item(second, [PROMPT[12], 1, 2], 12))[0].token_ids[0]
    assert executor.kv_capacity_snapshot().shared_blocks == 3
    assert executor.releasable_blocks(first) == 1
    output, position = [token], 15
    for step in range(5):
        run(executor, item(first, [step], 13 + step))
        output += run(executor, item(second, output[-1:], position + step))[0].token_ids
    assert output == cold
    executor.release_cache(first)
    executor.release_cache(second)
    usage = executor.kv_capacity_snapshot()
    assert (usage.used_blocks, usage.shared_blocks) == (0, 0)


def test_drafts_are_not_found_before_they_are_verified(build: Build) -> None:
    executor = build()
    a = admit(executor, PROMPT[:11])
    run(executor, item(a, PROMPT[:11], 0))
    drafted = [*PROMPT, 1, 2, 3]  # of these the last four are drafts
    run(executor, item(a, drafted[11:], 11, verify=True))
    for verified, cached in ((False, 12), (True, 16)):
        if verified:
            run(executor, item(a, [4], 16))
        admission = executor.try_admit_prefill("b", [*drafted, 4])
        assert isinstance(admission, Admitted)
        assert admission.num_cached_tokens == cached
        executor.cancel_prefill_admission("b")
    executor.release_cache(a)


def test_a_wrong_block_would_show(build: Build) -> None:
    """Negative control: a key that is given to a block with other tokens changes the output."""
    executor = build()
    cold = generate(executor, PROMPT, 8)
    pool = executor.kv._pools[0]
    other = admit(executor, [9] * 12)
    run(executor, item(other, [9] * 12, 0))
    for key, block in zip(executor.kv.prefix.keys(PROMPT), executor.kv.block_table(other, 0), strict=True):
        pool.forget(pool.find(key) or 0)
        pool.forget(block)
        pool.register(block, key)
    assert generate(executor, PROMPT, 8, use_prefix=True) != cold


def test_an_admission_holds_its_hit_until_it_is_cancelled(build: Build) -> None:
    executor = build(blocks=5)
    generate(executor, PROMPT, 2, use_prefix=True)
    admission = executor.try_admit_prefill("held", PROMPT)
    assert isinstance(admission, Admitted)
    assert executor.kv_capacity_snapshot().used_blocks == 3
    with pytest.raises(CapacityError):
        executor.reserve_kv_slots([KvSlotRequest(admit(executor, [1]), 12)])
    assert executor.cancel_prefill_admission("held")
    assert executor.kv_capacity_snapshot().used_blocks == 0


def test_preemption_is_by_request_and_cache_and_fails_closed(build: Build) -> None:
    executor = build()
    a, b = admit(executor, PROMPT, "a"), admit(executor, PROMPT, "b")
    run(executor, item(a, PROMPT, 0), item(b, PROMPT, 0))
    with pytest.raises(ContractError, match="not of request 'a'"):
        executor.preempt("a", b)
    executor.preempt("a", a)
    with pytest.raises(ContractError, match="released"):
        executor.preempt("a", a)
    again = executor.try_admit_prefill("a", PROMPT)
    assert isinstance(again, Admitted)
    assert again.num_cached_tokens == 12


def test_completion_names_its_request(build: Build) -> None:
    executor = build()
    a = admit(executor, PROMPT, "a")
    run(executor, item(a, PROMPT, 0))
    with pytest.raises(ContractError):
        executor.complete_cache(CacheCompletion("b", a, 13, 1))
    executor.complete_cache(CacheCompletion("a", a, 13, 1))


def test_a_discarded_prefill_is_not_found(build: Build) -> None:
    executor = build()
    a = admit(executor, PROMPT)
    run(executor, item(a, PROMPT, 0))
    executor.discard_prefill(a)
    with pytest.raises(ContractError):
        executor.discard_prefill(a)
    admission = executor.try_admit_prefill("again", PROMPT)
    assert isinstance(admission, Admitted)
    assert admission.num_cached_tokens == 0


def test_after_a_forward_that_failed_nothing_is_found(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools' contents are unknown then."""
    executor = build()
    cold = generate(executor, PROMPT, 4, use_prefix=True)
    cache = admit(executor, [1, 2])
    executor.reserve_kv_slots([KvSlotRequest(cache, 2)])
    with monkeypatch.context() as patch:
        patch.setattr(type(executor), "_launch", lambda self, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.prefill(item(cache, [1, 2], 0))
    executor.release_cache(cache)
    admission = executor.try_admit_prefill("again", PROMPT)
    assert isinstance(admission, Admitted)
    assert admission.num_cached_tokens == 0
    executor.cancel_prefill_admission("again")
    assert generate(executor, PROMPT, 4, use_prefix=True) == cold


def test_a_step_that_was_not_started_changes_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build()
    cache = admit(executor, [1, 2])
    executor.reserve_kv_slots([KvSlotRequest(cache, 2)])
    batch = UnifiedBatch((item(cache, [1, 2], 0),))
    for outcome in (Deferred(3), NotSubmitted(FerrumError("no"), (cache,))):
        with monkeypatch.context() as patch:
            patch.setattr(type(executor), "_launch", lambda self, batch, outcome=outcome: outcome)
            assert executor.submit(batch) == outcome
            with pytest.raises(FerrumError):
                executor.unified_decode(batch)
    assert executor.kv.length(cache) == 0
    assert len(executor.unified_decode(batch)[0].token_ids) == 1


def test_a_release_wakes_who_waits_for_capacity(build: Build) -> None:
    executor = build()
    cache = admit(executor, PROMPT)
    seen = executor.capacity.value
    woken: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: woken.append(executor.capacity.wait(seen, 30)), daemon=True)
        for _ in range(4)
    ]
    for waiter in waiters:
        waiter.start()
    executor.release_cache(cache)
    for waiter in waiters:
        waiter.join(30)
    assert woken == [True] * 4
    assert executor.capacity.wait(seen, 0)  # a release between the probe and the wait is not missed
    assert not executor.capacity.wait(executor.capacity.value, 0)


def test_shutdown_wakes_who_waits_for_capacity(build: Build) -> None:
    executor = build()
    woken: list[bool] = []
    seen = executor.capacity.value
    waiter = threading.Thread(target=lambda: woken.append(executor.capacity.wait(seen)), daemon=True)
    waiter.start()
    executor.shutdown()
    waiter.join(30)
    assert woken == [False]


def test_the_map_shows_what_the_numbers_say(build: Build) -> None:
    executor = build(blocks=6)
    first = admit(executor, PROMPT)
    run(executor, item(first, PROMPT, 0))
    second = admit(executor, PROMPT, use_prefix=True)
    (blocks,) = executor.kv_map().blocks
    assert executor.kv_map().groups == ("full",)
    assert sorted(blocks) == [0, 0, 1, 2, 2, 2]
    executor.release_cache(first)
    executor.release_cache(second)
    assert sorted(executor.kv_map().blocks[0]) == [-1, -1, -1, 0, 0, 0]
