"""Flat pools of K and V on MLX's device, and attention over them."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.step import Segment, Step, visible


class PagedStorage(Protocol):
    """K and V of one layer."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's K and V, [T, kv_heads, 1, head_dim], into their slots."""
        ...

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """queries [T, heads, 1, head_dim] → [T, heads, 1, value_dim]."""
        ...

    def extend(
        self, step: Step, segment: Segment, window: int | None, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write one sequence's new K and V, [1, kv_heads, rows, head_dim], and return all that its rows
        attend to, in order: [1, kv_heads, context_len - first key, head_dim]."""
        ...

    @property
    def dtype(self) -> mx.Dtype: ...

    def arrays(self) -> list[mx.array]:
        """The lazily written pools, to be evaluated with the step."""
        ...

    @property
    def nbytes(self) -> int: ...

    def pool_bytes(self) -> list[int]:
        """Of each pool that a write might copy; none where writes are in place by construction."""
        ...

    def reset(self) -> None:
        """Be usable again after a forward that failed; what was held is lost."""


class PoolStorage:
    """Flat pools `[slots, kv_heads, head_dim]`, K and V apart, on MLX's device.

    A layer's writes come before its reads, and no view of a pool is kept: so a write finds the only
    reference and is in place. Consecutive slots are written and read as a slice.
    """

    def __init__(
        self,
        group: int,
        num_slots: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        dtype: mx.Dtype,
    ) -> None:
        self._group = group
        self._shapes, self._dtype = ((num_slots, *key_shape), (num_slots, *value_shape)), dtype
        self.reset()

    def reset(self) -> None:
        self.keys: Any  # an array, or what reads and writes like one
        self.values: Any
        self.keys, self.values = (mx.zeros(shape, self._dtype) for shape in self._shapes)

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return sum(self.pool_bytes())

    def pool_bytes(self) -> list[int]:
        return [self.keys.nbytes, self.values.nbytes]

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        where = step.once(("device slots", self._group), lambda: _to_device(step.slots(self._group)))
        self.keys[where] = keys.squeeze(2)
        self.values[where] = values.squeeze(2)

    def extend(
        self, step: Step, segment: Segment, window: int | None, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        own = self._key_slots(step, segment, segment.pos_offset)
        seen = self._key_slots(step, segment, segment.first_key(window))
        self.keys[own] = keys[0].swapaxes(0, 1)
        new_keys = self.keys[seen].swapaxes(0, 1)[None]
        if not self.values.size:  # keys alone, as of an index; MLX divides by zero when it gathers these
            return new_keys, mx.zeros((*new_keys.shape[:3], 0), self._dtype)
        self.values[own] = values[0].swapaxes(0, 1)
        return new_keys, self.values[seen].swapaxes(0, 1)[None]

    def _key_slots(self, step: Step, segment: Segment, first: int) -> slice | mx.array:
        return step.once(
            ("device keys", segment.cache_id, self._group, first),
            lambda: _to_device(step.key_slots(segment, self._group, first)),
        )

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        reads = step.once(("reads", self._group, window), lambda: self._reads(step, window))
        out = [self._attend_read(read, queries, scale, sinks) for read in reads]
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=0)

    def _attend_read(self, read: Read, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Of a step's queries those of the read: [rows, heads, 1, value_dim]."""
        start, end, where, mask = read
        keys, values = self.keys[where], self.values[where]
        rows = queries[start:end]  # [rows, heads, 1, head_dim]
        if chunk := keys.ndim == 3:  # one sequence's rows: [1, heads, rows, head_dim]
            rows, keys, values = rows.transpose(2, 1, 0, 3), keys[None], values[None]
        result = mx.fast.scaled_dot_product_attention(
            rows, keys.swapaxes(1, 2), values.swapaxes(1, 2), scale=scale, mask=mask, sinks=sinks
        )
        return result.transpose(2, 1, 0, 3) if chunk else result

    def _reads(self, step: Step, window: int | None) -> list[Read]:
        """Decode rows in buckets, all else by segment."""
        reads: list[Read] = []
        alone = step.segments[step.num_decodes :]
        for bucket in step.decode_buckets():
            if len(bucket) == 1:  # reads a slice where its blocks are consecutive
                alone = [*bucket, *alone]
                continue
            slots, lengths = step.padded_slots(bucket, self._group, window)
            padding = np.arange(slots.shape[1])[None] >= lengths[:, None]
            mask = mx.array(~padding)[:, None, None] if padding.any() else None
            reads.append((bucket[0].start, bucket[-1].end, mx.array(slots), mask))
        reads += [self._read_of(step, segment, window) for segment in alone]
        return sorted(reads, key=lambda read: read[0])

    def _read_of(self, step: Step, segment: Segment, window: int | None) -> Read:
        first = segment.first_key(window)
        where = self._key_slots(step, segment, first)
        return segment.start, segment.end, where, _mask(segment, first, window)


Read = tuple[int, int, slice | mx.array, mx.array | str | None]  # first row, end row, key slots, mask


def _to_device(slots: slice | np.ndarray) -> slice | mx.array:
    return slots if isinstance(slots, slice) else mx.array(slots)


def _mask(segment: Segment, first: int, window: int | None) -> mx.array | str | None:
    if segment.num_rows == 1:
        return None
    if window is None or segment.context_len - first <= window:
        return "causal"
    return mx.array(visible(segment, first, window))
