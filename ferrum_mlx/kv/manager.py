"""Block tables, lengths and shared prefixes of every sequence, over one pool a KV group. Integers only.

Who owns a block: a sequence has a reference on every block of its tables, given up by truncate, by
release, or when a window has left it. A full block of verified tokens gets a key; from then on nobody
writes to it, and a later sequence with the same tokens takes a reference on it instead of computing it.
A hit is whole blocks and at most the prompt less one token, so writes never meet a shared block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np

from ferrum_mlx.capacity import CapacityVersion, KvSlotRequest, KvSlotReservation
from ferrum_mlx.errors import CapacityError, ContextLengthError, ContractError
from ferrum_mlx.kv.block_pool import NULL_BLOCK, BlockPool
from ferrum_mlx.kv.prefix import BlockKey
from ferrum_mlx.kv.prefix_cache import PrefixCache
from ferrum_mlx.kv.sequence import KVGroup, Sequence
from ferrum_mlx.kv.states import CopyState, StateSlots
from ferrum_mlx.metrics import KVMap, KVUsage


class KVManager:
    def __init__(
        self,
        groups: Iterable[KVGroup],
        num_blocks: Tokens[int],
        block_size: int,
        max_step_tokens: int,
        *,
        prefix_cache: bool = True,
        salt: Tokens[str] = (),
        num_states: int = 0,
        copy_state: CopyState | None = None,
    ) -> None:
        """num_blocks is by group; max_step_tokens bounds what a step adds to one sequence.

        Args:
            salt: what else two KV caches must have in common: model, revision, dtype.
            num_states: slots for the state of recurrent layers; 0 where there are none.
            copy_state: see StateSlots.
        """
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        # Most tokens one sequence can hold: what the smallest full-attention pool has room for.
        full = [n for n, group in zip(num_blocks, self.groups, strict=True) if group.window is None]
        self.max_tokens = min(full, default=sys.maxsize // block_size) * block_size
        self.capacity = CapacityVersion()
        self.tokens_held = self.max_tokens if full else 0  # by all sequences, as far as it has a bound
        self._max_step_tokens, self._copy_state = max_step_tokens, copy_state
        self._pools = [BlockPool(count) for count in num_blocks]
        self._states = StateSlots(num_states, copy_state) if copy_state else None
        self.prefix = PrefixCache(
            self.groups, self._pools, self._states, block_size, enabled=prefix_cache, salt=salt
        )
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 1

    def of_size(self, num_blocks: int) -> KVManager:
        """An empty one of the same groups, with so many blocks each, and as many states as it has."""
        num_states = self._states.pool.num_blocks if self._states else 0
        return KVManager(
            self.groups,
            [num_blocks] * len(self.groups),
            self.block_size,
            self._max_step_tokens,
            prefix_cache=False,
            num_states=num_states,
            copy_state=self._copy_state,
        )

    # Sequences

    def shortfall(self, target_len: int, keys: Tokens[BlockKey] = (), hit: int = 0) -> int:
        """Blocks that a new sequence of this length would find missing, in the fullest pool."""
        short = [self._pool_shortfall(g, target_len, keys[:hit]) for g in range(len(self.groups))]
        if self._states:
            short.append(self._states.shortfall(keys[hit - 1] if hit else None))
        return max([0, *short])

    def create(
        self,
        promised_len: int = 0,
        keys: Tokens[BlockKey] = (),
        hit: int = 0,
        salt: Tokens[str] = (),
    ) -> int:
        """A new sequence, starting behind the `hit` blocks it shares, with nothing allocated.

        `shortfall` counts the blocks up to promised_len as taken; a running sequence may still grow
        into them, and this one is then the one to be preempted. `salt` is that of its keys.
        """
        no_tables: list[list[int]] = [[] for _ in self.groups]
        seq = Sequence(promised_len, no_tables, [0] * len(self.groups), self.prefix.root_of(salt))
        if self._states:
            self._states.admit(seq, keys[hit - 1] if hit else None)
            split_at = (promised_len - 1) // self.block_size * self.block_size
            seq.split_at = split_at if split_at > hit * self.block_size and self.prefix.enabled else None
        self._share(seq, keys[:hit])
        self.prefix.start(seq, keys, hit)
        cache_id, self._next_id = self._next_id, self._next_id + 1
        self._sequences[cache_id] = seq
        return cache_id

    def __contains__(self, cache_id: int) -> bool:
        return cache_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def length(self, cache_id: int) -> int:
        return self._get(cache_id).length

    def num_cached(self, cache_id: int) -> int:
        """Tokens it found computed when it was created."""
        return self._get(cache_id).num_cached

    def split_at(self, cache_id: int) -> int | None:
        """Where a prefill chunk has to end, for the snapshot that is taken there."""
        return self._get(cache_id).split_at

    def block_table(self, cache_id: int, group: int) -> list[int]:
        return self._get(cache_id).tables[group]

    def state_slot(self, cache_id: int) -> int:
        """Of the recurrent layers' state; the first reservation gives it."""
        if not (slot := self._get(cache_id).state):
            raise ContractError(f"cache {cache_id} has no state yet", next_step="reserve its KV slots first")
        return slot

    def slot_mapping(self, cache_id: int, group: int, start: int, end: int) -> np.ndarray:
        """Slots of positions start … end - 1, int32: block · block_size + offset.

        Positions a window has left map into the null block.
        """
        self.check_reserved(cache_id, end)
        size, first = self.block_size, start // self.block_size
        blocks = np.array(self.block_table(cache_id, group)[first : -(-end // size)], dtype=np.int32)
        positions = np.arange(start, end, dtype=np.int32)
        return blocks[positions // size - first] * size + positions % size

    def check_reserved(self, cache_id: int, length: int) -> None:
        """Raise ContractError unless every position below `length` is writable."""
        if length > (reserved := self._reserved(self._get(cache_id))):
            raise ContractError(
                f"cache {cache_id} writes up to position {length}",
                f"allowed: {reserved}, what it has reserved",
            )

    def commit(self, cache_id: int, tokens: Tokens[int], *, drafts: int = 0) -> None:
        """The next positions hold the KV of `tokens`, of which the last `drafts` may be truncated.

        What an earlier commit left as drafts, and nobody has truncated since, is thereby verified.
        """
        seq = self._get(cache_id)
        self.check_reserved(cache_id, seq.length + len(tokens))
        seq.tokens.extend(tokens)
        seq.verified = seq.length - drafts
        if self.prefix.register(seq):
            self.capacity.bump()  # who waits for these blocks may probe again

    def truncate(self, cache_id: int, new_len: int) -> None:
        """Drop what is behind new_len; what is before it is thereby verified."""
        seq = self._get(cache_id)
        self._check_truncation(cache_id, seq, new_len)
        keep = self._blocks_for(new_len)
        full = new_len // self.block_size
        freed = any(len(table) > keep for table in seq.tables)
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            for block in table[full:keep]:  # about to be written to again
                pool.forget(block)
            pool.free(reversed(table[keep:]))
            del table[keep:]
            seq.left[g] = min(seq.left[g], keep)
        del seq.tokens[new_len:], seq.keys[full:]
        seq.verified = new_len
        if self.prefix.register(seq) or freed:
            self.capacity.bump()

    def release(self, cache_id: int, *, forget: bool = False) -> None:
        """Give up everything the sequence holds; an unknown cache is one released before.

        Args:
            forget: its own blocks do not stay findable.
        """
        seq = self._sequences.pop(cache_id, None)
        if seq is None:
            return
        self.prefix.forsake(seq)
        for pool, table in zip(self._pools, seq.tables, strict=True):
            own = table[seq.num_cached // self.block_size :] if forget else []
            pool.free(reversed(table))  # the end of a chain is of no use without its beginning
            for block in own:
                if not pool.references(block):
                    pool.forget(block)
        if self._states:
            self._states.release(seq)
        self.capacity.bump()

    def forget_prefixes(self) -> None:
        """No block can be found any more; those in use stay in use."""
        for pool in self._all_pools():
            pool.forget_all()

    def releasable(self, cache_id: int) -> int:
        """Blocks that no other sequence uses."""
        seq = self._get(cache_id)
        pools = zip(self._pools, seq.tables, strict=True)
        return sum(p.references(b) == 1 for p, table in pools for b in table) + bool(seq.state)

    # Capacity

    def reserve(self, requests: Tokens[KvSlotRequest]) -> KvSlotReservation:
        """Extend tables so that every position below each target is writable: all or nothing."""
        targets: dict[int, int] = {}
        for request in requests:
            targets[request.cache_id] = max(request.target_len, targets.get(request.cache_id, 0))
        sequences = {cache_id: self._get(cache_id) for cache_id in targets}
        missing = {cache_id: self._missing(seq, targets[cache_id]) for cache_id, seq in sequences.items()}
        self._check_room(sequences, missing, requests)
        before = self.usage().free_blocks
        owned_before = {cache_id: _owned(seq) for cache_id, seq in sequences.items()}
        for seq in sequences.values():  # before anyone allocates: what one leaves, another may need
            self._free_leaving(seq)
        for cache_id, seq in sequences.items():
            if self._states:
                self._states.acquire(seq)
            for pool, table, count in zip(self._pools, seq.tables, missing[cache_id], strict=True):
                if count:
                    table += pool.allocate(count, after=table[-1] if table else NULL_BLOCK)
        usage = self.usage()
        return KvSlotReservation(
            block_size=self.block_size,
            total_blocks=usage.total_blocks,
            free_blocks_before=before,
            free_blocks_after=usage.free_blocks,
            blocks_before=owned_before,
            blocks_after={cache_id: _owned(seq) for cache_id, seq in sequences.items()},
        )

    def usage(self) -> KVUsage:
        pools = self._all_pools()
        return KVUsage(
            block_size=self.block_size,
            total_blocks=sum(pool.num_blocks for pool in pools),
            used_blocks=sum(pool.num_used for pool in pools),
            shared_blocks=sum(pool.num_shared for pool in pools),
            cached_blocks=sum(pool.num_cached for pool in pools),
        )

    @property
    def evictions(self) -> int:
        return sum(pool.evictions for pool in self._all_pools())

    def num_keys(self, group: int) -> int:
        """Findable blocks of a group's pool."""
        return self._pools[group].num_keys

    @property
    def num_snapshots(self) -> int:
        return self._states.pool.num_keys if self._states else 0

    def map(self) -> KVMap:
        names = [f"window {g.window}" if g.window else "full" for g in self.groups]
        return KVMap(
            groups=tuple(names + ["state"] * bool(self._states)),
            blocks=tuple(pool.states() for pool in self._all_pools()),
        )

    # Inside

    def _get(self, cache_id: int) -> Sequence:
        try:
            return self._sequences[cache_id]
        except KeyError:
            raise ContractError(
                f"there is no cache {cache_id}; it was never admitted, or is released"
            ) from None

    def _all_pools(self) -> list[BlockPool]:
        return [*self._pools, self._states.pool] if self._states else self._pools

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _need(self, group: int, length: int) -> int:
        """Most blocks a sequence holds at once on its way to this length."""
        window = self.groups[group].window
        if window is None:
            return self._blocks_for(length)
        return self._blocks_for(min(length, window + self._max_step_tokens + self.block_size))

    def _pool_shortfall(self, group: int, target_len: int, hit: Tokens[BlockKey]) -> int:
        pool = self._pools[group]
        prefills = (s for s in self._sequences.values() if s.length < s.promised_len)
        promised = (max(0, self._need(group, s.promised_len) - s.owned(group)) for s in prefills)
        found = [block for key in hit[self._first_block(group, len(hit)) :] if (block := pool.find(key))]
        held = sum(map(pool.is_cached, found))  # free now, and not when they are shared
        needed = max(0, self._need(group, target_len) - len(found))
        return needed + held + sum(promised) - pool.num_free

    def _first_block(self, group: int, num_blocks: int) -> int:
        """The first block that a sequence of that many full blocks still needs."""
        return self.groups[group].first_key(num_blocks * self.block_size) // self.block_size

    def _share(self, seq: Sequence, hit: Tokens[BlockKey]) -> None:
        for g, pool in enumerate(self._pools):
            seq.left[g] = first = self._first_block(g, len(hit))
            blocks = [pool.find(key) for key in hit[first:]]
            shared = [block for block in blocks if block is not None]
            assert len(shared) == len(blocks)
            for block in shared:
                pool.share(block)
            seq.tables[g] = [NULL_BLOCK] * first + shared
        for key in hit:
            seq.tokens.frombytes(key.content[len(self.prefix.root) :])
        seq.keys = list(hit)
        seq.verified = seq.num_cached = seq.length

    def _check_truncation(self, cache_id: int, seq: Sequence, new_len: int) -> None:
        if not 0 <= new_len <= seq.length:
            raise ContractError(f"cache {cache_id} is truncated to {new_len}", f"allowed: 0 to {seq.length}")
        if self._states and new_len < seq.length:
            raise ContractError(f"cache {cache_id} carries a state, which cannot be rolled back")
        keep = self._blocks_for(new_len)
        for g, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            if group.first_key(new_len) // self.block_size < min(seq.left[g], keep):
                raise ContractError(
                    f"cache {cache_id} is truncated to {new_len}, into blocks its window has left"
                )
            cut = seq.tables[g][new_len // self.block_size : keep]
            if new_len % self.block_size and any(pool.references(block) > 1 for block in cut):
                raise ContractError(f"cache {cache_id} is truncated to {new_len}, into a block others share")

    def _reserved(self, seq: Sequence) -> int:
        return min(map(len, seq.tables), default=sys.maxsize) * self.block_size

    def _missing(self, seq: Sequence, target_len: int) -> list[int]:
        if target_len > self.max_tokens:
            raise ContextLengthError(
                f"a sequence of {target_len} tokens does not fit the KV pool",
                f"allowed: at most {self.max_tokens}",
                "raise --kv-memory or shorten the prompt",
            )
        needed = self._blocks_for(target_len)
        return [max(0, needed - len(table)) for table in seq.tables]

    def _check_room(
        self, sequences: dict[int, Sequence], missing: dict[int, list[int]], requests: Tokens[KvSlotRequest]
    ) -> None:
        fits = {r.cache_id: r.admission_target_len for r in requests if r.admission_target_len > r.target_len}
        for g, pool in enumerate(self._pools):
            needed = sum(counts[g] for counts in missing.values())
            needed += sum(
                max(0, self._need(g, length) - len(sequences[c].tables[g]) - missing[c][g])
                for c, length in fits.items()
            )
            if needed > pool.num_free:
                free = pool.num_free + sum(self._would_free(seq, g) for seq in sequences.values())
                if needed > free:
                    raise CapacityError(needed, free)

    def _leaving(self, seq: Sequence, group: int) -> range:
        """Indices into the table of blocks that no later token attends to."""
        first = self.groups[group].first_key(seq.length) // self.block_size
        return range(seq.left[group], max(seq.left[group], first))

    def _would_free(self, seq: Sequence, group: int) -> int:
        pool, table = self._pools[group], seq.tables[group]
        return sum(pool.references(table[i]) == 1 for i in self._leaving(seq, group))

    def _free_leaving(self, seq: Sequence) -> None:
        for g, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            if self.groups[g].window is None:
                continue
            for i in self._leaving(seq, g):
                pool.free([table[i]])
                table[i] = NULL_BLOCK
                seq.left[g] = i + 1
                self.capacity.bump()


def _owned(seq: Sequence) -> int:
    return sum(map(seq.owned, range(len(seq.tables))))
