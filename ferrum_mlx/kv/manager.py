"""Block tables and lengths of every sequence, over one pool a KV group. Integers only.

position   0 ......... length ......... reserved
           |  computed  |  writable now  |          reserved = blocks · block_size
blocks     owned by the sequence; freed by truncate, release, or when a window has left them
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferrum_mlx.capacity import CapacityVersion, KvSlotRequest, KvSlotReservation
from ferrum_mlx.errors import CapacityError, ContextLengthError, ContractError
from ferrum_mlx.kv.block_pool import NULL_BLOCK, BlockPool
from ferrum_mlx.metrics import CacheMetrics, KVMap, KVUsage


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal kind, window and bytes a token; they share a pool and a block table.

    window is the sliding window in tokens, None for full attention.
    """

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int  # K and V of all its layers

    def first_key(self, length: int) -> int:
        """First position that the next token, at position `length`, still attends to."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def window_blocks(self, block_size: int) -> int:
        """Most blocks that the window of one sequence touches."""
        assert self.window is not None
        return -(-self.window // block_size) + 1


@dataclass(slots=True)
class _Sequence:
    promised_len: int
    tables: list[list[int]]  # one append-only block table a group
    left: list[int]  # by group: leading blocks that the window has left, null in the table
    length: int = 0

    def owned(self, group: int) -> int:
        return len(self.tables[group]) - self.left[group]


class KVManager:
    def __init__(
        self, groups: Sequence[KVGroup], num_blocks: Sequence[int], block_size: int, max_step_tokens: int
    ) -> None:
        """num_blocks is by group; max_step_tokens bounds what a step adds to one sequence."""
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.capacity = CapacityVersion()
        self._max_step_tokens = max_step_tokens
        self._pools = [BlockPool(count) for count in num_blocks]
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 1

    # Sequences

    def create(self, promised_len: int = 0) -> int:
        """A new, empty sequence. `shortfall` counts the blocks up to promised_len as taken; a running
        sequence may still grow into them, and this one is then the one to be preempted."""
        cache_id, self._next_id = self._next_id, self._next_id + 1
        self._sequences[cache_id] = _Sequence(promised_len, [[] for _ in self.groups], [0] * len(self.groups))
        return cache_id

    def __contains__(self, cache_id: int) -> bool:
        return cache_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def length(self, cache_id: int) -> int:
        return self._get(cache_id).length

    def block_table(self, cache_id: int, group: int) -> list[int]:
        return self._get(cache_id).tables[group]

    def slot_mapping(self, cache_id: int, group: int, start: int, end: int) -> np.ndarray:
        """Slots of positions start … end - 1, int32: block · block_size + offset.

        Positions a window has left map into the null block.
        """
        self.check_reserved(cache_id, end)
        positions = np.arange(start, end, dtype=np.int32)
        table = np.array(self.block_table(cache_id, group), dtype=np.int32)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def check_reserved(self, cache_id: int, length: int) -> None:
        """Raise ContractError unless every position below `length` is writable."""
        if length > (reserved := self._reserved(self._get(cache_id))):
            raise ContractError(
                f"cache {cache_id} writes up to position {length}",
                f"allowed: {reserved}, what it has reserved",
            )

    def commit(self, cache_id: int, new_len: int) -> None:
        """Positions below new_len now hold computed KV."""
        self.check_reserved(cache_id, new_len)
        seq = self._get(cache_id)
        if new_len < seq.length:
            raise ContractError(
                f"cache {cache_id} commits {new_len}", f"allowed: at least {seq.length}, its length"
            )
        seq.length = new_len

    def truncate(self, cache_id: int, new_len: int) -> None:
        seq = self._get(cache_id)
        if not 0 <= new_len <= seq.length:
            raise ContractError(f"cache {cache_id} is truncated to {new_len}", f"allowed: 0 to {seq.length}")
        keep = self._blocks_for(new_len)
        for group, left in zip(self.groups, seq.left, strict=True):
            if group.first_key(new_len) // self.block_size < min(left, keep):
                raise ContractError(
                    f"cache {cache_id} is truncated to {new_len}, into blocks its window has left"
                )
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            pool.free(table[keep:])
            del table[keep:]
            seq.left[g] = min(seq.left[g], keep)
        seq.length = new_len
        self.capacity.bump()

    def release(self, cache_id: int) -> None:
        """Free everything the sequence owns; an unknown cache is one released before."""
        seq = self._sequences.pop(cache_id, None)
        if seq is None:
            return
        for pool, table in zip(self._pools, seq.tables, strict=True):
            pool.free(table)
        self.capacity.bump()

    def releasable(self, cache_id: int) -> int:
        seq = self._get(cache_id)
        return sum(map(seq.owned, range(len(self.groups))))

    # Capacity

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Extend tables so that every position below each target is writable: all or nothing."""
        targets: dict[int, int] = {}
        for request in requests:
            targets[request.cache_id] = max(request.target_len, targets.get(request.cache_id, 0))
        missing = {cache_id: self._missing(cache_id, target) for cache_id, target in targets.items()}
        for g, pool in enumerate(self._pools):
            needed = sum(counts[g] for counts in missing.values())
            free = pool.num_free + sum(len(self._leaving(self._get(c), g)) for c in targets)
            if needed > free:
                raise CapacityError(needed, free)
        before = self.usage().free_blocks
        owned_before = {cache_id: self.releasable(cache_id) for cache_id in targets}
        for cache_id in targets:
            self._free_leaving(self._get(cache_id))
        for cache_id, counts in missing.items():
            for pool, table, count in zip(self._pools, self._get(cache_id).tables, counts, strict=True):
                table += pool.allocate(count, after=table[-1] if table else NULL_BLOCK)
        usage = self.usage()
        return KvSlotReservation(
            block_size=self.block_size,
            total_blocks=usage.total_blocks,
            free_blocks_before=before,
            free_blocks_after=usage.free_blocks,
            blocks_before=owned_before,
            blocks_after={cache_id: self.releasable(cache_id) for cache_id in targets},
        )

    def shortfall(self, target_len: int) -> int:
        """Blocks that a new sequence of this length would find missing, in the fullest pool."""
        return max(0, *(self._pool_shortfall(g, target_len) for g in range(len(self.groups))))

    @property
    def max_tokens(self) -> int:
        """Most tokens one sequence can hold: what the smallest full-attention pool has room for."""
        pools = zip(self.groups, self._pools, strict=True)
        return min(
            (p.num_blocks * self.block_size for g, p in pools if g.window is None), default=sys.maxsize
        )

    def usage(self) -> KVUsage:
        return KVUsage(
            block_size=self.block_size,
            total_blocks=sum(pool.num_blocks for pool in self._pools),
            used_blocks=sum(pool.num_used for pool in self._pools),
        )

    def map(self) -> KVMap:
        raise NotImplementedError

    def cache_metrics(self) -> CacheMetrics:
        raise NotImplementedError

    # Inside

    def _get(self, cache_id: int) -> _Sequence:
        try:
            return self._sequences[cache_id]
        except KeyError:
            raise ContractError(
                f"there is no cache {cache_id}; it was never admitted, or is released"
            ) from None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _need(self, group: int, length: int) -> int:
        """Most blocks a sequence holds at once on its way to this length."""
        window = self.groups[group].window
        if window is None:
            return self._blocks_for(length)
        return self._blocks_for(min(length, window + self._max_step_tokens + self.block_size))

    def _pool_shortfall(self, group: int, target_len: int) -> int:
        promised = (
            max(0, self._need(group, s.promised_len) - s.owned(group)) for s in self._sequences.values()
        )
        return self._need(group, target_len) + sum(promised) - self._pools[group].num_free

    def _reserved(self, seq: _Sequence) -> int:
        return min((len(table) for table in seq.tables), default=0) * self.block_size

    def _missing(self, cache_id: int, target_len: int) -> tuple[int, ...]:
        if target_len > self.max_tokens:
            raise ContextLengthError(
                f"a sequence of {target_len} tokens does not fit the KV pool",
                f"allowed: at most {self.max_tokens}",
                "raise --kv-memory or shorten the prompt",
            )
        needed = self._blocks_for(target_len)
        return tuple(max(0, needed - len(table)) for table in self._get(cache_id).tables)

    def _leaving(self, seq: _Sequence, group: int) -> range:
        """Indices into the table of blocks that no later token attends to."""
        return range(
            seq.left[group], max(seq.left[group], self.groups[group].first_key(seq.length) // self.block_size)
        )

    def _free_leaving(self, seq: _Sequence) -> None:
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            for i in self._leaving(seq, g):
                pool.free([table[i]])
                table[i] = NULL_BLOCK
                seq.left[g] = i + 1
                self.capacity.bump()
