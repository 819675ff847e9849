from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.kv.block_pool import NULL_BLOCK
from ferrum_mlx.kv.manager import KVGroup, KVManager

FULL = KVGroup(layers=(0,), window=None, bytes_per_token=4)
WINDOW = KVGroup(layers=(1,), window=6, bytes_per_token=4)


def grown(kv: KVManager, length: int) -> int:
    cache = kv.create()
    kv.reserve([KvSlotRequest(cache, length)])
    kv.commit(cache, length)
    return cache


def test_slots_follow_the_table() -> None:
    kv = KVManager([FULL], [6], block_size=4, max_step_tokens=8)
    blocker, cache = grown(kv, 4), grown(kv, 4)
    kv.reserve([KvSlotRequest(blocker, 5), KvSlotRequest(cache, 10)])
    table = kv.block_table(cache, 0)
    expected = [table[p // 4] * 4 + p % 4 for p in range(2, 10)]
    np.testing.assert_array_equal(kv.slot_mapping(cache, 0, 2, 10), expected)
    with pytest.raises(ContractError):
        kv.slot_mapping(cache, 0, 0, 13)


def test_a_window_group_frees_what_the_window_has_left() -> None:
    kv = KVManager([FULL, WINDOW], [10, 10], block_size=2, max_step_tokens=8)
    cache = grown(kv, 9)
    kv.reserve([KvSlotRequest(cache, 10)])
    # position 9 comes next and sees positions 4 … 9: blocks 0 and 1 hold none of them
    assert kv.block_table(cache, 1)[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in kv.block_table(cache, 1)[2:]
    assert NULL_BLOCK not in kv.block_table(cache, 0)
    assert kv.usage().used_blocks == 5 + 3
    kv.truncate(cache, 9)
    with pytest.raises(ContractError):
        kv.truncate(cache, 7)  # its next token would see a block that is gone
    kv.release(cache)
    assert kv.usage().used_blocks == 0


def test_one_short_group_reserves_in_none() -> None:
    kv = KVManager([FULL, WINDOW], [5, 5], block_size=2, max_step_tokens=8)
    long = grown(kv, 10)  # full group: 5 of 5 used
    kv.reserve([KvSlotRequest(long, 10)])  # window group: 3 used, two are free again
    other = kv.create()
    with pytest.raises(CapacityError):
        kv.reserve([KvSlotRequest(other, 2)])
    assert kv.block_table(other, 1) == []


def test_commit_stays_inside_the_reservation() -> None:
    kv = KVManager([FULL], [5], block_size=2, max_step_tokens=8)
    cache = grown(kv, 3)
    for wrong in (2, 5):
        with pytest.raises(ContractError):
            kv.commit(cache, wrong)


class Machine(RuleBasedStateMachine):
    """Random creates, reservations, truncations and releases over two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager([FULL, WINDOW], [12, 12], block_size=2, max_step_tokens=8)
        self.live: list[int] = []

    @rule(promised=st.integers(0, 12))
    def create(self, promised: int) -> None:
        self.live.append(self.kv.create(promised))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 7))
    def grow(self, data: st.DataObject, more: int) -> None:
        cache = data.draw(st.sampled_from(self.live))
        target = self.kv.length(cache) + more
        if target > self.kv.max_tokens:
            return
        before = [
            self.kv.usage(),
            self.kv.capacity.value,
            *(list(self.kv.block_table(cache, g)) for g in (0, 1)),
        ]
        try:
            self.kv.reserve([KvSlotRequest(cache, target)])
        except CapacityError:
            tables = (self.kv.block_table(cache, g) for g in (0, 1))
            assert before == [self.kv.usage(), self.kv.capacity.value, *tables]  # nothing at all
        else:
            slots = self.kv.slot_mapping(cache, 0, 0, target)
            assert len(set(slots.tolist())) == target
            self.kv.commit(cache, target)

    @rule(length=st.integers(1, 24))
    def a_fit_is_a_fit(self, length: int) -> None:
        """Where no block is missing for a new sequence, it can be reserved to its end in steps of 8."""
        if length > self.kv.max_tokens or self.kv.shortfall(length):
            return
        cache = self.kv.create(length)
        for target in (*range(8, length, 8), length):
            self.kv.reserve([KvSlotRequest(cache, target)])
            self.kv.commit(cache, target)
        self.kv.release(cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.live))
        length = self.kv.length(cache)
        new = data.draw(st.integers(0, length))
        before = [list(self.kv.block_table(cache, g)) for g in (0, 1)]
        try:
            self.kv.truncate(cache, new)
        except ContractError:
            assert self.kv.length(cache) == length
            assert before == [self.kv.block_table(cache, g) for g in (0, 1)]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.live))
        version = self.kv.capacity.value
        self.live.remove(cache)
        self.kv.release(cache)
        assert self.kv.capacity.value > version

    @invariant()
    def every_block_has_one_owner(self) -> None:
        used = 0
        for group in (0, 1):
            owned = [b for c in self.live for b in self.kv.block_table(c, group) if b != NULL_BLOCK]
            assert len(owned) == len(set(owned))
            used += len(owned)
        assert used == self.kv.usage().used_blocks == sum(self.kv.releasable(c) for c in self.live)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
