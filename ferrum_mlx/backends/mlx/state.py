"""The state of recurrent layers: mlx-lm's own arrays, kept by slot.

Arrays of MLX are values: a model replaces the entries of its cache and never writes into one, so states
can share them. Sequences that decode together stay one batch from step to step; whoever leaves it gets
a copy of its row, so that nobody keeps a batch alive for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ferrum_mlx.backends.step import Segment, Step
from ferrum_mlx.errors import ContractError

Entries = tuple[mx.array | None, ...]  # of one layer, [rows, …]; None before the first token


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    slots: tuple[int, ...]  # one a row
    entries: Entries

    def row(self, slot: int) -> Entries:
        if self.slots == (slot,):
            return self.entries
        row = self.slots.index(slot)
        return _detached(tuple(None if a is None else a[row : row + 1] for a in self.entries))


class StateStore:
    """What each slot holds; `sizes` is the number of entries by state layer."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._slots: dict[int, list[_Batch]] = {}  # by layer
        self._open: list[tuple[int, tuple[int, ...], Any]] = []  # layer, slots, mlx-lm's cache
        self._split: list[mx.array] = []  # rows taken out of batches, to be evaluated with the step

    def copy(self, source: int | None, target: int) -> None:
        """`source` None is the initial state."""
        if source is None:
            rows: list[Entries] = [(None,) * size for size in self._sizes]
        else:
            rows = [batch.row(source) for batch in self._held(source)]
            mx.async_eval([a for entries in rows for a in entries if a is not None])
        self._slots[target] = [_Batch((target,), entries) for entries in rows]

    def open(self, layer: int, slots: tuple[int, ...]) -> Any:
        """mlx-lm's cache for these slots as one batch, to be run once in a step; their shapes are equal."""
        if any(layer == other and set(slots) & set(others) for other, others, _ in self._open):
            raise ContractError(f"the state of layer {layer} runs twice in one step")
        cache: Any = ArraysCache(self._sizes[layer])
        cache.cache = list(self._together(layer, slots))
        self._open.append((layer, slots, cache))
        return cache

    def _together(self, layer: int, slots: tuple[int, ...]) -> Entries:
        batches = [self._held(slot)[layer] for slot in slots]
        if batches[0].slots == slots and all(batch is batches[0] for batch in batches):
            return batches[0].entries
        for batch in set(batches):
            self._take_apart(layer, batch)
        parts = zip(*(self._slots[slot][layer].entries for slot in slots), strict=True)
        if len(slots) == 1:
            return tuple(part for (part,) in parts)
        return tuple(None if part[0] is None else mx.concatenate(list(part), axis=0) for part in parts)

    def _take_apart(self, layer: int, batch: _Batch) -> None:
        for slot in batch.slots:
            if self._slots[slot][layer] is batch:  # else the slot has begun anew
                entries = batch.row(slot)
                self._slots[slot][layer] = _Batch((slot,), entries)
                self._split += [a for a in entries if a is not None]

    def shapes(self, slot: int) -> tuple[tuple[int, ...] | None, ...]:
        """Of a row of every entry, None before the first token; equal ones can be one batch."""
        entries = (a for batch in self._held(slot) for a in batch.entries)
        return tuple(None if a is None else a.shape[1:] for a in entries)

    def close(self) -> list[mx.array]:
        """Keep what the opened caches hold now; the new arrays, to be evaluated with the step."""
        new, self._split = self._split, []
        for layer, slots, cache in self._open:
            batch = _Batch(slots, _detached(tuple(cache.cache)))
            for slot in slots:
                self._slots[slot][layer] = batch
            new += [a for a in batch.entries if a is not None]
        self._open.clear()
        return new

    def reset(self) -> None:
        """After a forward that failed, some layers may be a step ahead of their sequence."""
        self._slots.clear()
        self._open.clear()
        self._split.clear()

    def _held(self, slot: int) -> list[_Batch]:
        try:
            return self._slots[slot]
        except KeyError:
            raise ContractError(
                f"the state in slot {slot} was lost in a step that failed",
                next_step="compute the sequence anew",
            ) from None


def _detached(entries: Entries) -> Entries:
    """A view would keep alive what it is a part of: the chunk that it ends, or the batch."""
    return tuple(None if a is None else mx.contiguous(a) for a in entries)


class StateLayer:
    """The cache object of a layer's state; a module can only use it alone (see loop.py)."""

    is_state = True

    def __init__(self, store: StateStore, layer: int) -> None:
        self._store, self._layer = store, layer

    def make_mask(self, N: int) -> None:
        """Nothing is padded."""

    def alone(self, step: Step, segments: Sequence[Segment]) -> Any:
        slots = tuple(step.state_slot(segment) for segment in segments)
        return step.once((id(self), slots), lambda: self._store.open(self._layer, slots))
