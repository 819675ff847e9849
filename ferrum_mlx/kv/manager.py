"""Block tables and lengths of every sequence, over one pool a KV group. Integers only.

position   0 ......... length ......... reserved
           |  computed  |  writable now  |          reserved = blocks · block_size
blocks     owned by the sequence; freed by truncate, release, or when a window has left them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferrum_mlx.errors import CapacityError, ContextLengthError, ContractError
from ferrum_mlx.executor import KvSlotRequest, KvSlotReservation
from ferrum_mlx.kv.block_pool import NULL_BLOCK, BlockPool
from ferrum_mlx.metrics import KVUsage


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal kind, window and bytes a token; they share a pool and a block table.

    window is the sliding window in tokens, None for full attention.
    """

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int  # K and V of all its layers


@dataclass(slots=True)
class _Sequence:
    promised_len: int  # admitted for this length; its unallocated blocks are not offered to others
    tables: list[list[int]]  # one append-only block table a group
    length: int = 0


class KVManager:
    def __init__(self, groups: Sequence[KVGroup], num_blocks: int, block_size: int) -> None:
        """Every group gets a pool of `num_blocks` blocks of `block_size` tokens."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.version = 0  # grows whenever blocks are released
        self._pools = [BlockPool(num_blocks) for _ in self.groups]
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 1

    # Sequences

    def create(self, promised_len: int = 0) -> int:
        """A new, empty sequence; later admissions leave it the blocks up to `promised_len`."""
        cache_id, self._next_id = self._next_id, self._next_id + 1
        self._sequences[cache_id] = _Sequence(promised_len, [[] for _ in self.groups])
        return cache_id

    def __contains__(self, cache_id: int) -> bool:
        return cache_id in self._sequences

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
        for group, table in zip(self.groups, seq.tables, strict=True):
            if NULL_BLOCK in table[self._first_in_window(group, new_len) // self.block_size : keep]:
                raise ContractError(
                    f"cache {cache_id} is truncated to {new_len}, into blocks its window has left"
                )
        for pool, table in zip(self._pools, seq.tables, strict=True):
            pool.free(table[keep:])
            del table[keep:]
        seq.length = new_len
        self.version += 1

    def release(self, cache_id: int) -> None:
        """Free everything the sequence owns; an unknown cache is one released before."""
        seq = self._sequences.pop(cache_id, None)
        if seq is None:
            return
        for pool, table in zip(self._pools, seq.tables, strict=True):
            pool.free(table)
        self.version += 1

    def releasable(self, cache_id: int) -> int:
        return sum(block != NULL_BLOCK for table in self._get(cache_id).tables for block in table)

    # Capacity

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Extend tables so that every position below each target is writable: all or nothing."""
        targets: dict[int, int] = {}
        for request in requests:
            targets[request.cache_id] = max(request.target_len, targets.get(request.cache_id, 0))
        missing = {cache_id: self._missing(cache_id, target) for cache_id, target in targets.items()}
        for cache_id in targets:
            self._free_left_of_window(self._get(cache_id))
        for pool, counts in zip(self._pools, zip(*missing.values(), strict=True), strict=False):
            if sum(counts) > pool.num_free:
                raise CapacityError(sum(counts), pool.num_free)
        before = self.usage().free_blocks
        for cache_id, counts in missing.items():
            for pool, table, count in zip(self._pools, self._get(cache_id).tables, counts, strict=True):
                table += pool.allocate(count, after=table[-1] if table else NULL_BLOCK)
        usage = self.usage()
        return KvSlotReservation(
            block_size=self.block_size,
            total_blocks=usage.total_blocks,
            free_blocks_before=before,
            free_blocks_after=usage.free_blocks,
            new_blocks={cache_id: sum(counts) for cache_id, counts in missing.items()},
        )

    def shortfall(self, target_len: int) -> int:
        """Blocks that a new sequence of this length would find missing, in the fullest group."""
        needed = self._blocks_for(target_len)
        for seq in self._sequences.values():
            shortest = min((len(table) for table in seq.tables), default=0)
            needed += max(0, self._blocks_for(seq.promised_len) - shortest)
        return max(0, needed - min((pool.num_free for pool in self._pools), default=needed))

    @property
    def max_tokens(self) -> int:
        """Most tokens one sequence can hold."""
        return self.num_blocks * self.block_size

    def usage(self) -> KVUsage:
        return KVUsage(
            block_size=self.block_size,
            total_blocks=self.num_blocks * len(self._pools),
            used_blocks=sum(pool.num_used for pool in self._pools),
        )

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

    @staticmethod
    def _first_in_window(group: KVGroup, length: int) -> int:
        """First position that the next token (at position `length`) still attends to."""
        return 0 if group.window is None else max(0, length - group.window + 1)

    def _free_left_of_window(self, seq: _Sequence) -> None:
        for pool, group, table in zip(self._pools, self.groups, seq.tables, strict=True):
            left = [i for i in range(self._first_in_window(group, seq.length) // self.block_size) if table[i]]
            if left:
                pool.free(table[i] for i in left)
                for i in left:
                    table[i] = NULL_BLOCK
                self.version += 1
