"""How much of a prompt is in the cache already."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_mlx.kv.block_pool import BlockPool
from ferrum_mlx.kv.prefix import BlockKey
from ferrum_mlx.kv.sequence import KVGroup
from ferrum_mlx.kv.states import StateSlots


def longest_hit(
    keys: Sequence[BlockKey],
    groups: Sequence[KVGroup],
    pools: Sequence[BlockPool],
    states: StateSlots | None,
    block_size: int,
) -> int:
    """How many leading blocks a new sequence can share.

    Every block of a full-attention group must be there, of a window group only those its window
    reaches, and of recurrent layers a snapshot at that very point.
    """
    most = len(keys)
    windowed: list[tuple[KVGroup, list[int]]] = []
    for group, pool in zip(groups, pools, strict=True):
        if group.window is None:
            most = _leading(keys[:most], pool)
        else:
            windowed.append((group, _runs(keys, pool)))
    for count in range(most, 0, -1):
        if states and states.pool.find(keys[count - 1]) is None:
            continue
        if all(
            runs[count - 1] >= count - group.first_key(count * block_size) // block_size
            for group, runs in windowed
        ):
            return count
    return 0


def _leading(keys: Sequence[BlockKey], pool: BlockPool) -> int:
    for count, key in enumerate(keys):
        if pool.find(key) is None:
            return count
    return len(keys)


def _runs(keys: Sequence[BlockKey], pool: BlockPool) -> list[int]:
    """For each block, how many in a row up to it are there."""
    runs: list[int] = []
    for key in keys:
        runs.append((runs[-1] if runs else 0) + 1 if pool.find(key) is not None else 0)
    return runs
