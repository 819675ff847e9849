"""A step's metadata: rows, positions, slots, masks."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_mlx.backends import step as step_module
from ferrum_mlx.backends.step import Step, visible
from ferrum_mlx.batch import UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup


def build() -> tuple[Step, list[int], KVManager]:
    """A chunk of 3, a decode at position 5, a verify of 2 at position 2, a last chunk of 2."""
    kv = KVManager([KVGroup((0,), None, 4)], [20], block_size=4, max_step_tokens=8)
    starts, counts = [0, 5, 2, 4], [3, 1, 2, 2]
    caches = [kv.create() for _ in starts]
    for cache, start, count in zip(caches, starts, counts, strict=True):
        kv.reserve([KvSlotRequest(cache, start + count)])
        kv.commit(cache, [0] * start)
    kinds = [{"is_final_chunk": False}, {}, {"verify": True}, {}]
    items = [
        UnifiedItem(cache_id=c, q_tokens=tuple(range(10 * i, 10 * i + n)), pos_offset=s, **kind)
        for i, (c, s, n, kind) in enumerate(zip(caches, starts, counts, kinds, strict=True))
    ]
    return Step(UnifiedBatch(tuple(items)), kv), caches, kv


def test_decodes_come_first_and_results_go_back_in_order() -> None:
    step, caches, _ = build()
    assert step.num_decodes == 1
    assert [s.cache_id for s in step.segments] == [caches[1], caches[0], caches[2], caches[3]]
    assert step.token_ids.tolist() == [10, 0, 1, 2, 20, 21, 30, 31]
    assert step.positions.tolist() == [5, 0, 1, 2, 2, 3, 4, 5]
    assert step.rows.tolist() == [0, 4, 5, 7]  # none of the intermediate chunk, all of the verify item
    assert step.in_batch_order(["decode", "chunk", "verify", "last"]) == ["chunk", "decode", "verify", "last"]


def test_slots_are_the_tables_slots() -> None:
    step, _, kv = build()
    expected = []
    for segment in step.segments:
        table = kv.block_table(segment.cache_id, 0)
        expected += [table[p // 4] * 4 + p % 4 for p in range(segment.pos_offset, segment.context_len)]
    slots = step.slots(0)
    assert isinstance(slots, np.ndarray)
    assert slots.tolist() == expected
    assert len(set(expected)) == len(expected)


def test_consecutive_slots_are_a_slice_and_others_are_not() -> None:
    kv = KVManager([KVGroup((0,), None, 4)], [20], block_size=4, max_step_tokens=8)
    first, second = kv.create(), kv.create()
    for target in (4, 8):  # the second sequence's block lies between the first one's two
        kv.reserve([KvSlotRequest(first, target), KvSlotRequest(second, 4)])
    items = [UnifiedItem(cache_id=c, q_tokens=(1,) * n, pos_offset=0) for c, n in ((first, 8), (second, 4))]
    step = Step(UnifiedBatch(tuple(items)), kv)
    scattered, run = (step.key_slots(segment, 0, 0) for segment in step.segments)
    assert isinstance(scattered, np.ndarray)
    assert scattered.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert run == slice(8, 12)


def test_visible_is_causal_and_windowed() -> None:
    step, _, _ = build()
    last = step.segments[3]  # positions 4 and 5
    assert visible(last, 0, None).astype(int).tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert last.first_key(3) == 2
    assert visible(last, 2, 3).astype(int).tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


def test_keys_that_lie_backwards_are_read_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LONG_RUN", 1)
    kv = KVManager([KVGroup((0,), None, 4)], [11], block_size=4, max_step_tokens=8)
    before = kv.create()
    kv.reserve([KvSlotRequest(before, 40)])
    kv.release(before)
    cache = kv.create()
    for target in range(8, 41, 8):
        kv.reserve([KvSlotRequest(cache, target)])
    table = kv.block_table(cache, 0)
    assert table != sorted(table)  # as a pool that was used up hands them out
    for rows, window in ((1, None), (1, 17), (3, None), (3, 17)):
        item = UnifiedItem(cache_id=cache, q_tokens=(1,) * rows, pos_offset=38 - rows, verify=rows > 1)
        step = Step(UnifiedBatch((item,)), kv)
        segment = step.segments[0]
        first = segment.first_key(window)
        slots = [table[p // 4] * 4 + p % 4 for p in range(first, 38)]
        runs = step.key_runs(segment, 0, window)
        assert [run.start for run in runs] + [len(slots)] == [0, *(run.end for run in runs)]
        read = [slot for run in runs for slot in range(run.slots.start, run.slots.stop)]
        # whole blocks that all rows see; a part of one, and what a row writes that another does not see, stay
        start = -(-first // 4) * 4
        stop = (38 - rows + 1) // 4 * 4 if rows == 1 or window is None else start
        a, b = start - first, stop - first
        assert read == slots[:a] + sorted(slots[a:b]) + slots[b:]
