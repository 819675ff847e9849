"""A step to try attention on, without a model: sequences of given lengths, their blocks apart."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ferrum_mlx.backends.mlx.kernels.tables import TableStorage
from ferrum_mlx.backends.step import Step
from ferrum_mlx.batch import UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup


def trial_step(
    contexts: Sequence[int], rows: int, block_size: int, window: int | None, *, apart: bool = True
) -> tuple[Step, int]:
    """A step in which each sequence has up to `rows` rows and the last one sees that many keys.

    Args:
        apart: no two blocks of a sequence are neighbours.

    Returns:
        the step, and how many slots its pool has.
    """
    num_blocks = sum(-(-context // block_size) for context in contexts) + -(-max(contexts) // block_size)
    kv = KVManager(
        [KVGroup((0,), window, 1)], [num_blocks], block_size, max(rows, block_size), prefix_cache=False
    )
    caches = [kv.create() for _ in contexts]
    others = [kv.create()] if apart else []  # their blocks lie between
    for end in range(block_size, max(contexts) + block_size, block_size):
        for cache, context in zip(caches, contexts, strict=True):
            kv.reserve([KvSlotRequest(cache, min(end, context))])
            kv.commit(cache, [0] * (min(end, context - _rows(context, rows)) - kv.length(cache)))
        for other in others:
            kv.reserve([KvSlotRequest(other, end)])
            kv.commit(other, [0] * block_size)
    items = []
    for cache, context in zip(caches, contexts, strict=True):
        count = _rows(context, rows)
        items.append(UnifiedItem(cache_id=cache, q_tokens=(0,) * count, pos_offset=context - count))
    return Step(UnifiedBatch(tuple(items)), kv), (num_blocks + 1) * block_size


def _rows(context: int, rows: int) -> int:
    return min(context, rows)


def trial_storage(
    num_slots: int, key_shape: tuple[int, int], value_shape: tuple[int, int], dtype: mx.Dtype
) -> TableStorage:
    """A pool of random keys and values around 1; shapes are (kv_heads, head_dim)."""
    storage = TableStorage(0, num_slots, key_shape, value_shape, dtype)
    storage.keys, storage.values = (
        mx.random.normal((num_slots, *shape), dtype=dtype, key=mx.random.key(seed))
        for seed, shape in enumerate((key_shape, value_shape))
    )
    return storage
