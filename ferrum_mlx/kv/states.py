"""Slots for the state of recurrent layers: one a sequence, and snapshots that later prompts start from.

A state is a point of a sequence, not a run of blocks: it cannot be cut or extended backwards. So
snapshots are taken where a later prompt may branch off: behind the last block that the same prompt could
share, and, from the prompt's end on, behind every full block, of which only the latest is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrum_mlx.kv.block_pool import BlockPool
from ferrum_mlx.kv.prefix import BlockKey
from ferrum_mlx.kv.sequence import Sequence

CopyState = Callable[[int | None, int], None]  # (source slot, or None for the initial state; target slot)


class StateSlots:
    """Decides which slots hold what; `copy_state` is the backend's, which holds the arrays."""

    def __init__(self, num_slots: int, copy_state: CopyState) -> None:
        self.pool = BlockPool(num_slots)
        self._copy = copy_state
        self._promised = 0  # sequences admitted that have no slot yet

    def shortfall(self, hit: BlockKey | None) -> int:
        """Slots missing for a new sequence that would start from snapshot `hit`."""
        held = hit is not None and (slot := self.pool.find(hit)) is not None and self.pool.is_cached(slot)
        return max(0, 1 + self._promised + held - self.pool.num_free)

    def admit(self, seq: Sequence, hit: BlockKey | None) -> None:
        self._promised += 1
        if hit is not None:
            slot = self.pool.find(hit)
            assert slot is not None
            self.pool.share(slot)
            seq.restore = slot

    def acquire(self, seq: Sequence) -> None:
        """Give an admitted sequence its slot, in its initial or its snapshot's state."""
        if seq.state:
            return
        (seq.state,) = self.pool.allocate(1)
        self._promised -= 1
        self._copy(seq.restore or None, seq.state)
        if seq.restore:
            self.pool.free([seq.restore])
            seq.restore = 0

    def release(self, seq: Sequence) -> None:
        if seq.state:
            self.pool.free([seq.state])
            self._empty(seq.state)
        else:
            self._promised -= 1
        if seq.restore:
            self.pool.free([seq.restore])
        seq.state = seq.restore = 0

    def snapshot(self, seq: Sequence, key: BlockKey, *, decoding: bool) -> None:
        """Keep the state as it is behind block `key`; passed over when every slot is taken."""
        if decoding and seq.rolling is not None and (old := self.pool.find(seq.rolling)) is not None:
            if self.pool.is_cached(old):
                self.pool.forget(old)
                self._empty(old)
            seq.rolling = None
        if self.pool.find(key) is not None or self.pool.num_free <= self._promised:
            return
        (slot,) = self.pool.allocate(1)
        self._copy(seq.state, slot)
        self.pool.register(slot, key)
        self.pool.free([slot])
        if decoding:
            seq.rolling = key

    def _empty(self, slot: int) -> None:
        """Arrays that nobody can find any more would be kept until the slot's turn comes."""
        self._copy(None, slot)
