"""Slots for recurrent state: one a sequence, snapshots at the ends of prompts and turns."""

from __future__ import annotations

import pytest

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.batch import UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ContractError
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup

FULL = KVGroup(layers=(0,), window=None, bytes_per_token=4)


class Bench:
    """A manager with a "state" that is all tokens so far, as the slots' contents."""

    def __init__(self, num_states: int = 8, groups: tuple[KVGroup, ...] = (FULL,)) -> None:
        self.slots: dict[int, list[int]] = {}
        self.kv = KVManager(groups, [40] * len(groups), 4, 32, num_states=num_states, copy_state=self.copy)

    def copy(self, source: int | None, target: int) -> None:
        self.slots[target] = [] if source is None else list(self.slots[source])

    def admit(self, prompt: list[int]) -> int:
        keys = self.kv.prefix.keys(prompt)
        return self.kv.create(len(prompt), keys, self.kv.prefix.find(keys, len(prompt)))

    def extend(self, cache: int, tokens: list[int]) -> None:
        self.kv.reserve([KvSlotRequest(cache, self.kv.length(cache) + len(tokens))])
        self.slots[self.kv.state_slot(cache)] += tokens
        self.kv.commit(cache, tokens)

    def prefill(self, prompt: list[int]) -> int:
        """As a scheduler does it: a chunk ends where the snapshot is taken."""
        cache = self.admit(prompt)
        cut = self.kv.split_at(cache) or self.kv.length(cache)
        for end in (cut, len(prompt)):
            if part := prompt[self.kv.length(cache) : end]:
                self.extend(cache, part)
        return cache


TEXT = list(range(100, 130))


@pytest.mark.parametrize("groups", [(FULL,), ()])
def test_a_prompt_starts_from_the_snapshot_at_the_end_of_another(groups: tuple[KVGroup, ...]) -> None:
    bench = Bench(groups=groups)
    bench.kv.release(bench.prefill(TEXT[:14]))
    assert bench.kv.num_snapshots == 1
    cache = bench.prefill(TEXT[:20])
    assert bench.kv.num_cached(cache) == 12
    assert bench.slots[bench.kv.state_slot(cache)] == TEXT[:20]


def test_who_needs_the_snapshot_waits_for_it_and_not_for_the_blocks_before() -> None:
    bench = Bench()
    prefix = bench.kv.prefix
    twin, branch = prefix.keys(TEXT[:14]), prefix.keys([*TEXT[:9], 1, 2, 3, 4])
    cache = bench.admit(TEXT[:14])
    for end in (5, 9, 12):  # 12 is where the snapshot is taken
        assert prefix.is_coming(twin, 14, 0)
        assert not prefix.is_coming(branch, 13, 0)
        version = bench.kv.capacity.value
        bench.extend(cache, TEXT[bench.kv.length(cache) : end])
    assert bench.kv.capacity.value > version
    assert not prefix.is_coming(twin, 14, prefix.find(twin, 14))
    assert prefix.find(twin, 14) == 3
    for waiting in (bench.admit([1] * 9), bench.admit([1] * 3)):
        bench.kv.release(waiting)
    assert not prefix._coming


def test_a_prompt_is_snapshotted_at_its_split_alone_however_it_is_cut() -> None:
    bench = Bench()
    cache = bench.admit(TEXT[:14])
    for end, snapshots in ((4, 0), (8, 0), (12, 1), (14, 1)):
        bench.extend(cache, TEXT[bench.kv.length(cache) : end])
        assert bench.kv.num_snapshots == snapshots


def test_an_admission_that_never_ran_gives_its_snapshot_back() -> None:
    bench = Bench()
    bench.kv.release(bench.prefill(TEXT[:9]))
    cache = bench.admit(TEXT[:12])
    assert bench.kv.num_cached(cache) == 8
    bench.kv.release(cache)
    assert bench.kv.usage().used_blocks == 0


def test_starting_from_a_snapshot_takes_two_slots_for_a_while() -> None:
    bench = Bench(num_states=2)
    bench.kv.release(bench.prefill(TEXT[:9]))
    bench.extend(bench.admit([1] * 3), [1] * 3)  # the snapshot's slot is the only free one now
    keys = bench.kv.prefix.keys(TEXT[:12])
    assert bench.kv.shortfall(12, keys, bench.kv.prefix.find(keys, 12)) == 1
    assert bench.kv.shortfall(12) == 0


def test_who_holds_nothing_but_a_state_can_still_give_that() -> None:
    bench = Bench(groups=())
    assert bench.kv.releasable(bench.prefill(TEXT[:9])) == 1


def test_a_branch_inside_a_prompt_is_a_miss_without_a_snapshot_there() -> None:
    bench = Bench()
    bench.kv.release(bench.prefill(TEXT[:14]))
    cache = bench.prefill([*TEXT[:9], 1, 2, 3])
    assert bench.kv.num_cached(cache) == 0
    assert bench.slots[bench.kv.state_slot(cache)] == [*TEXT[:9], 1, 2, 3]


def test_while_decoding_only_the_latest_snapshot_is_kept() -> None:
    bench = Bench()
    cache = bench.prefill(TEXT[:6])  # snapshot at 4
    for token in TEXT[6:27]:
        bench.extend(cache, [token])
    assert bench.kv.num_snapshots == 2  # at 4 and at 24
    bench.kv.release(cache)
    turn = bench.prefill(TEXT)
    assert bench.kv.num_cached(turn) == 24
    assert bench.slots[bench.kv.state_slot(turn)] == TEXT


def test_a_snapshot_is_detached_from_the_sequence_it_was_taken_of() -> None:
    bench = Bench()
    cache = bench.prefill(TEXT[:9])
    bench.extend(cache, [1, 2, 3, 4])
    other = bench.prefill([*TEXT[:8], 9])
    assert bench.kv.num_cached(other) == 8
    assert bench.slots[bench.kv.state_slot(other)] == [*TEXT[:8], 9]


def test_slots_are_promised_at_admission_and_all_free_at_the_end() -> None:
    bench = Bench(num_states=2)
    a, b = bench.admit(TEXT[:3]), bench.admit(TEXT[:3])
    assert bench.kv.shortfall(3) == 1
    bench.extend(a, TEXT[:3])
    assert bench.kv.shortfall(3) == 1
    with pytest.raises(ContractError, match="no state yet"):
        bench.kv.state_slot(b)
    bench.kv.release(b)
    assert bench.kv.shortfall(3) == 0
    bench.kv.release(a)
    assert bench.kv.usage().used_blocks == 0


def test_snapshots_give_way_to_sequences_and_never_the_other_way_round() -> None:
    bench = Bench(num_states=2)
    a = bench.prefill(TEXT[:9])
    assert bench.kv.num_snapshots == 1  # the second slot
    b = bench.admit([1] * 3)
    bench.extend(b, [1] * 3)
    assert bench.kv.num_snapshots == 0
    for token in range(8):
        bench.extend(a, [token])
    assert bench.kv.num_snapshots == 0
    bench.kv.release(a)
    bench.kv.release(b)


def test_a_snapshot_that_is_about_to_be_restored_is_not_evicted() -> None:
    bench = Bench(num_states=3)
    bench.kv.release(bench.prefill(TEXT[:9]))
    waiting = bench.admit(TEXT[:12])
    assert bench.kv.num_cached(waiting) == 8
    other = bench.prefill([1] * 9)  # wants a snapshot of its own, too
    bench.extend(waiting, TEXT[8:12])
    assert bench.slots[bench.kv.state_slot(waiting)] == TEXT[:12]
    bench.kv.release(waiting)
    bench.kv.release(other)
    assert bench.kv.usage().used_blocks == 0


def test_a_state_is_not_rolled_back() -> None:
    bench = Bench()
    cache = bench.prefill(TEXT[:9])
    with pytest.raises(ContractError, match="rolled back"):
        bench.kv.truncate(cache, 8)
    bench.kv.truncate(cache, 9)


def test_drafts_are_refused_before_they_touch_a_state() -> None:
    executor = FakeExecutor(EngineConfig(block_size=4, max_model_len=64), stateful=True)
    admission = executor.try_admit_prefill("a", TEXT[:5])
    assert isinstance(admission, Admitted)
    cache = admission.cache_id
    executor.reserve_kv_slots([KvSlotRequest(cache, 9)])
    executor.prefill(UnifiedItem(cache_id=cache, q_tokens=tuple(TEXT[:5]), pos_offset=0))
    with pytest.raises(ContractError, match="draft"):
        executor.forward_verify(UnifiedItem(cache_id=cache, q_tokens=(1, 2), pos_offset=5, verify=True))
    executor.forward_verify(UnifiedItem(cache_id=cache, q_tokens=(1,), pos_offset=5, verify=True))
    assert executor.kv.length(cache) == 6


def test_snapshots_count_among_what_the_cache_holds() -> None:
    executor = FakeExecutor(EngineConfig(block_size=4, max_model_len=64), stateful=True)
    admission = executor.try_admit_prefill("a", TEXT[:5])
    assert isinstance(admission, Admitted)
    executor.reserve_kv_slots([KvSlotRequest(admission.cache_id, 4)])
    chunk = UnifiedItem(
        cache_id=admission.cache_id, q_tokens=tuple(TEXT[:4]), pos_offset=0, is_final_chunk=False
    )
    executor.prefill(chunk)
    metrics = executor.cache_metrics()
    assert (metrics.entries, metrics.bytes) == (2, 4 * 4 + 4)  # a block of four tokens, and a state
