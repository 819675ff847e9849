"""Admission, reservation and release: who owns which blocks, and when."""

from __future__ import annotations

import pytest

from ferrum_mlx.capacity import Admitted, CacheCompletion, Deferred, KvSlotRequest, Rejected
from ferrum_mlx.errors import CapacityError, ContextLengthError, ContractError

from .conftest import Build
from .driver import admit, item, run


def test_admission_allocates_nothing_and_can_be_cancelled(build: Build) -> None:
    executor = build(blocks=4)
    admission = executor.try_admit_prefill("a", [1] * 9)
    assert isinstance(admission, Admitted)
    assert executor.kv_capacity_snapshot().used_blocks == 0
    with pytest.raises(ContractError):
        executor.try_admit_prefill("a", [1] * 9)
    assert executor.cancel_prefill_admission("a")
    assert not executor.cancel_prefill_admission("a")


def test_admissions_promise_blocks_to_one_sequence_only(build: Build) -> None:
    executor = build(blocks=4)
    assert isinstance(executor.try_admit_prefill("a", [1] * 12), Admitted)
    assert executor.try_admit_prefill("b", [2] * 12) == Deferred(shortfall=2)
    assert isinstance(executor.try_admit_prefill("c", [3] * 4), Admitted)


def test_no_more_sequences_than_there_are_seats(build: Build) -> None:
    executor = build(max_num_seqs=3)
    caches = [admit(executor, [i]) for i in range(3)]
    assert executor.try_admit_prefill("more", [9]) == Deferred(shortfall=0)
    executor.release_cache(caches[0])
    assert isinstance(executor.try_admit_prefill("more", [9]), Admitted)


def test_a_request_that_comes_back_with_other_tokens_is_looked_up_anew(build: Build) -> None:
    executor = build(blocks=4)
    first = admit(executor, [1] * 9)
    run(executor, item(first, [1] * 9, 0))
    assert isinstance(executor.try_admit_prefill("a", [2] * 9), Deferred)
    admission = executor.try_admit_prefill("a", [1] * 9)
    assert isinstance(admission, Admitted)
    assert admission.num_cached_tokens == 8


def test_what_never_fits_is_rejected(build: Build) -> None:
    executor = build(blocks=4)
    for prompt in ([], [1] * 17):  # the pool holds 16 tokens
        rejected = executor.try_admit_prefill("a", prompt)
        assert isinstance(rejected, Rejected)
        assert "1 to 16" in rejected.reason


def test_reservation_is_all_or_nothing(build: Build) -> None:
    executor = build(blocks=4)
    a, b = admit(executor, [1] * 4), admit(executor, [2] * 4)
    with pytest.raises(CapacityError) as error:
        executor.reserve_kv_slots([KvSlotRequest(a, 12), KvSlotRequest(b, 8)])
    assert (error.value.needed_blocks, error.value.free_blocks) == (5, 4)
    assert executor.kv_capacity_snapshot().used_blocks == 0
    done = executor.reserve_kv_slots([KvSlotRequest(a, 12), KvSlotRequest(a, 3), KvSlotRequest(b, 4)])
    assert (done.free_blocks_before, done.free_blocks_after) == (4, 0)
    assert (done.blocks_before, done.blocks_after) == ({a: 0, b: 0}, {a: 3, b: 1})


def test_too_long_is_a_typed_error(build: Build) -> None:
    executor = build(blocks=40)
    a = admit(executor, [1])
    with pytest.raises(ContextLengthError):
        executor.reserve_kv_slots([KvSlotRequest(a, 65)])
    small = build(blocks=4)
    with pytest.raises(ContextLengthError):
        small.reserve_kv_slots([KvSlotRequest(admit(small, [1]), 17)])


def test_truncate_only_shrinks_and_frees(build: Build) -> None:
    executor = build()
    a = admit(executor, [1] * 10)
    run(executor, item(a, [1] * 10, 0))
    assert executor.releasable_blocks(a) == 3
    for wrong in (-1, 11):
        with pytest.raises(ContractError):
            executor.truncate_kv(a, wrong)
    version = executor.capacity.value
    executor.truncate_kv(a, 4)
    assert executor.releasable_blocks(a) == 1
    assert executor.capacity.value > version
    with pytest.raises(ContractError):
        executor.truncate_kv(10**6, 0)


def test_release_is_idempotent_and_completion_is_not(build: Build) -> None:
    executor = build()
    a = admit(executor, [1] * 10, "a")
    run(executor, item(a, [1] * 10, 0))
    version = executor.capacity.value
    executor.release_cache(a)
    executor.release_cache(a)
    assert executor.capacity.value == version + 1
    assert executor.kv_capacity_snapshot().used_blocks == 0
    with pytest.raises(ContractError):
        executor.complete_cache(CacheCompletion("a", a, 10, 0))


def test_an_admission_is_used_up_by_its_first_forward(build: Build) -> None:
    executor = build()
    admission = executor.try_admit_prefill("a", [1] * 4)
    assert isinstance(admission, Admitted)
    run(executor, item(admission.cache_id, [1] * 4, 0))
    assert not executor.cancel_prefill_admission("a")
    executor.release_cache(admission.cache_id)
    assert isinstance(executor.try_admit_prefill("a", [1] * 4), Admitted)


def test_real_values_not_constants(build: Build) -> None:
    executor = build(blocks=4, max_num_seqs=3)
    facts = executor.capabilities()
    assert (facts.max_batch_size, facts.max_sequence_length, facts.kv_capacity) == (3, 64, 16)
    assert executor.maximum_active_sequences == 3
    assert executor.memory().kv_pool_bytes == 5 * 4 * executor.memory().kv_bytes_per_token
    a = admit(executor, [1] * 4)
    before = executor.status().forwards
    run(executor, item(a, [1] * 4, 0))
    status = executor.status()
    assert status.forwards == before + 1
    assert status.forward_seconds > 0
    assert status.kv.used_blocks == 1
