from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.kv.block_pool import NULL_BLOCK
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup

FULL = KVGroup(layers=(0,), window=None, bytes_per_token=4)
WINDOW = KVGroup(layers=(1,), window=6, bytes_per_token=4)


def grown(kv: KVManager, length: int) -> int:
    cache = kv.create()
    kv.reserve([KvSlotRequest(cache, length)])
    kv.commit(cache, [7] * length)
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
    cache, version = grown(kv, 9), kv.capacity.value
    kv.reserve([KvSlotRequest(cache, 10)])
    assert kv.capacity.value > version  # who waits for blocks may probe again
    # position 9 comes next and sees positions 4 … 9: blocks 0 and 1 hold none of them
    assert kv.block_table(cache, 1)[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in kv.block_table(cache, 1)[2:]
    assert NULL_BLOCK not in kv.block_table(cache, 0)
    assert kv.usage().used_blocks == 5 + 3
    assert kv.usage().cached_blocks == 2  # what the window has left can still be found
    kv.truncate(cache, 9)
    with pytest.raises(ContractError):
        kv.truncate(cache, 7)  # its next token would see a block that is gone
    kv.truncate(cache, 0)
    kv.reserve([KvSlotRequest(cache, 9)])
    kv.commit(cache, [7] * 9)
    kv.reserve([KvSlotRequest(cache, 10)])
    assert kv.usage().used_blocks == 5 + 3  # it leaves them once more
    kv.release(cache)
    assert kv.usage().used_blocks == 0


def test_a_window_keeps_the_block_of_its_first_position() -> None:
    kv = KVManager([FULL, WINDOW], [10, 10], block_size=2, max_step_tokens=10)
    cache = grown(kv, 10)
    kv.reserve([KvSlotRequest(cache, 11)])  # position 10 sees 5 … 10, and 5 is the last of block 2
    assert [block == NULL_BLOCK for block in kv.block_table(cache, 1)] == [True, True, *[False] * 4]


def test_one_short_group_reserves_in_none() -> None:
    kv = KVManager([FULL, WINDOW], [5, 5], block_size=2, max_step_tokens=8)
    long = grown(kv, 10)  # full group: 5 of 5 used
    kv.reserve([KvSlotRequest(long, 10)])  # window group: 3 used, two are free again
    other = kv.create()
    with pytest.raises(CapacityError):
        kv.reserve([KvSlotRequest(other, 2)])
    assert kv.block_table(other, 1) == []


def test_what_one_sequence_leaves_another_gets_in_the_same_reservation() -> None:
    kv = KVManager([FULL, WINDOW], [20, 10], block_size=2, max_step_tokens=12)
    short, long = grown(kv, 6), grown(kv, 14)  # the window pool is full; the long one has left four blocks
    kv.reserve([KvSlotRequest(short, 8), KvSlotRequest(long, 14)])
    assert len(kv.block_table(short, 1)) == 4


def test_a_step_in_the_middle_of_a_block_is_promised_to_a_window_group() -> None:
    def manager(blocks: int) -> KVManager:
        return KVManager([FULL, KVGroup((1,), 7, 4)], [20, blocks], block_size=4, max_step_tokens=8)

    assert manager(4).shortfall(24) == 1
    kv = manager(5)
    assert kv.shortfall(24) == 0
    cache = kv.create(24)
    for length in (8, 9, 17, 24):  # 17: the window goes back to position 3, five blocks
        kv.reserve([KvSlotRequest(cache, length)])
        kv.commit(cache, [7] * (length - kv.length(cache)))


def test_leaving_a_shared_block_makes_no_room() -> None:
    kv = KVManager([FULL, WINDOW], [20, 6], block_size=2, max_step_tokens=8)
    caches = []
    for _ in range(2):
        keys = kv.prefix.keys([7] * 9)
        caches.append(kv.create(9, keys, kv.prefix.find(keys, 9)))
        kv.reserve([KvSlotRequest(caches[-1], 9)])
        kv.commit(caches[-1], [7] * (9 - kv.length(caches[-1])))
    table = list(kv.block_table(caches[0], 1))
    with pytest.raises(CapacityError) as short:  # it leaves block 0, and block 1, which the other has, too
        kv.reserve([KvSlotRequest(caches[0], 14)])
    assert (short.value.needed_blocks, short.value.free_blocks) == (2, 1)
    assert kv.block_table(caches[0], 1) == table


def test_a_window_group_promises_nothing_beyond_the_prompt() -> None:
    """Who decodes needs its window alone: a step's worth of blocks each would keep others out."""
    kv = KVManager([FULL, WINDOW], [40, 12], block_size=2, max_step_tokens=8)
    cache = kv.create(16)
    assert kv.shortfall(16) > 0  # 8 blocks each, on their way
    for length in (8, 16):
        kv.reserve([KvSlotRequest(cache, length)])
        kv.commit(cache, [7] * 8)
    kv.reserve([KvSlotRequest(cache, 17)])  # 4 of the window's blocks are left to it
    assert kv.shortfall(16) == 0


def test_commit_stays_inside_the_reservation() -> None:
    kv = KVManager([FULL], [5], block_size=2, max_step_tokens=8)
    cache = grown(kv, 3)
    with pytest.raises(ContractError):
        kv.commit(cache, [7, 7])


def test_a_fit_check_allocates_nothing() -> None:
    kv = KVManager([FULL], [5], block_size=2, max_step_tokens=8)
    cache = kv.create()
    kv.reserve([KvSlotRequest(cache, 4, admission_target_len=10)])
    assert kv.usage().used_blocks == 2
    other = kv.create()
    with pytest.raises(CapacityError) as short:
        kv.reserve([KvSlotRequest(other, 2, admission_target_len=8)])
    assert (short.value.needed_blocks, short.value.free_blocks) == (4, 3)
    assert kv.usage().used_blocks == 2


class Machine(RuleBasedStateMachine):
    """Random creates, reservations, truncations and releases over two groups, prefixes shared.

    A shadow of the pools holds the token that was written to each slot, so that a block found by its
    key can be compared with what the prompt says, and a write to a shared block is noticed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager([FULL, WINDOW], [12, 12], block_size=2, max_step_tokens=8)
        self.live: dict[int, list[int]] = {}  # cache → its tokens
        self.slots: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.hits = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def create(self, prompt: list[int]) -> None:
        prefix = self.kv.prefix
        keys = prefix.keys(prompt)
        hit = prefix.find(keys, len(prompt))
        if self.kv.shortfall(len(prompt), keys, hit):
            return
        cache = self.kv.create(len(prompt), keys, hit)
        self.live[cache] = prompt[: 2 * hit]
        assert self.kv.length(cache) == 2 * hit < len(prompt)
        self.hits += hit

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=7), drafts=st.booleans())
    def grow(self, data: st.DataObject, more: list[int], drafts: bool) -> None:
        cache = data.draw(st.sampled_from(sorted(self.live)))
        start = self.kv.length(cache)
        target = start + len(more)
        if target > self.kv.max_tokens:
            return
        before = [self.kv.usage(), self.kv.capacity.value, *self.tables(cache)]
        try:
            self.kv.reserve([KvSlotRequest(cache, target)])
        except CapacityError:
            assert before == [self.kv.usage(), self.kv.capacity.value, *self.tables(cache)]  # nothing at all
            return
        self.write(cache, start, more)
        self.kv.commit(cache, more, drafts=len(more) - 1 if drafts else 0)
        self.live[cache] += more

    def tables(self, cache: int) -> list[list[int]]:
        return [list(self.kv.block_table(cache, g)) for g in (0, 1)]

    def write(self, cache: int, start: int, tokens: list[int]) -> None:
        for g in (0, 1):
            table = self.kv.block_table(cache, g)
            where = self.kv.slot_mapping(cache, g, start, start + len(tokens)).tolist()
            for slot in where:
                block = slot // 2
                owners = [c for c in self.live if block in self.kv.block_table(c, g)]
                assert owners == [cache], "a write to a block that others use"
                assert block == table[-1] or block in table
            self.slots[g].update(zip(where, tokens, strict=True))

    @rule(length=st.integers(1, 24))
    def a_fit_is_a_fit(self, length: int) -> None:
        """Where no block is missing for a new sequence, it can be reserved to its end in steps of 8."""
        if length > self.kv.max_tokens or self.kv.shortfall(length):
            return
        cache = self.kv.create(length)
        self.live[cache] = []
        for target in (*range(8, length, 8), length):
            tokens = [5] * (target - self.kv.length(cache))
            self.kv.reserve([KvSlotRequest(cache, target)])
            self.write(cache, self.kv.length(cache), tokens)
            self.kv.commit(cache, tokens)
        del self.live[cache]
        self.kv.release(cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(sorted(self.live)))
        length = self.kv.length(cache)
        new = data.draw(st.integers(0, length))
        before = self.tables(cache)
        try:
            self.kv.truncate(cache, new)
        except ContractError:
            assert self.kv.length(cache) == length
            assert before == self.tables(cache)
        else:
            del self.live[cache][new:]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        cache = data.draw(st.sampled_from(sorted(self.live)))
        version = self.kv.capacity.value
        del self.live[cache]
        self.kv.release(cache, forget=forget)
        assert self.kv.capacity.value > version

    @invariant()
    def references_are_the_tables_that_name_a_block(self) -> None:
        usage = self.kv.usage()
        counts: list[int] = []
        for g, states in enumerate(self.kv.map().blocks):
            named = [b for c in self.live for b in self.kv.block_table(c, g) if b != NULL_BLOCK]
            for block, state in enumerate(states, 1):
                assert named.count(block) == max(state, 0)
            counts += states
        assert usage.used_blocks == sum(state > 0 for state in counts)
        assert usage.shared_blocks == sum(state > 1 for state in counts)
        assert usage.cached_blocks == sum(state == -1 for state in counts)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for cache, tokens in self.live.items():
            assert list(self.kv._get(cache).tokens) == tokens
            for g in (0, 1):
                first = self.kv.groups[g].first_key(len(tokens))
                where = self.kv.slot_mapping(cache, g, first, len(tokens)).tolist()
                assert [self.slots[g][slot] for slot in where] == tokens[first:]

    @invariant()
    def releasable_is_what_no_other_uses(self) -> None:
        for cache in self.live:
            alone = 0
            for g in (0, 1):
                others = {b for c in self.live if c != cache for b in self.kv.block_table(c, g)}
                alone += len(set(self.kv.block_table(cache, g)) - others - {NULL_BLOCK})
            assert self.kv.releasable(cache) == alone


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
