"""Paged attention under mlx-lm's untouched model classes.

Every scheduled token is a batch row of length 1, the shape the models already take in a batched
decode. Each layer's cache object is a `PagedLayer`: it gives RoPE the rows' positions, writes K and V
into the pool's slots and returns itself as an opaque handle; mlx-lm's `scaled_dot_product_attention`,
replaced once by a dispatcher, hands such handles to the layer's `attend` and everything else to the
original. Nothing here knows an architecture.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm.models.base as mlx_lm_base
import numpy as np

from ferrum_mlx.backends.mlx.step import Segment, Step, visible, window_of
from ferrum_mlx.errors import UnsupportedModelError

_original_attention = mlx_lm_base.scaled_dot_product_attention


@dataclass(slots=True)
class StepContext:
    """Shared by the layers of one executor; None between steps."""

    step: Step | None = None
    positions: mx.array | None = None  # [T] int32


@dataclass(frozen=True, slots=True)
class PagedMask:
    """What `make_mask` returns; the real masks depend on the segment."""

    window: int | None


class PagedStorage(Protocol):
    """K and V of one layer, and attention over them."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Put a step's K and V, [T, kv_heads, 1, head_dim], into their slots."""
        ...

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """queries [T, heads, 1, head_dim] → [T, heads, 1, value_dim]."""
        ...

    @property
    def dtype(self) -> mx.Dtype: ...

    def arrays(self) -> list[mx.array]:
        """The lazily written pools, to be evaluated with the step."""
        ...

    @property
    def nbytes(self) -> int: ...

    def reset(self) -> None:
        """Be usable again after a forward that failed; what was held is lost."""


class PagedLayer:
    """The cache object of one layer, in the shape mlx-lm's models expect of a cache."""

    def __init__(self, context: StepContext, storage: PagedStorage, window: int | None) -> None:
        self._context, self.storage, self._window = context, storage, window

    @property
    def offset(self) -> mx.array:
        assert self._context.positions is not None
        return self._context.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedLayer, PagedLayer]:
        assert self._context.step is not None
        self.storage.write(self._context.step, keys, values)
        return self, self

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> PagedMask:
        if window_size and self._window and window_size > self._window:
            raise UnsupportedModelError(
                f"the model masks {window_size} tokens where its cache keeps {self._window}",
                "mlx-lm itself then gives other results for other chunks",
                "choose another model",
            )
        return PagedMask(window_of(window_size, self._window))

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        if mask is not None and not isinstance(mask, PagedMask):
            raise UnsupportedModelError(
                "the model builds its own attention mask, which paged attention cannot read"
            )
        assert self._context.step is not None
        window = window_of(self._window, mask.window if mask else None)
        return self.storage.attend(self._context.step, queries, window, scale, sinks)

    @property
    def dtype(self) -> mx.Dtype:
        return self.storage.dtype

    def astype(self, dtype: mx.Dtype) -> PagedLayer:
        """Some models widen keys before attention; the pool can only agree."""
        if dtype != self.dtype:
            raise UnsupportedModelError(f"the model wants its {self.dtype} keys and values as {dtype}")
        return self

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return False


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, PagedLayer):
        return keys.attend(queries, scale, mask, sinks)
    return _original_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install() -> None:
    """Replace mlx-lm's attention by the dispatcher, also where a model module holds it by name."""
    mlx_lm_base.scaled_dot_product_attention = _dispatch
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("mlx_lm.models.")
            and vars(module).get("scaled_dot_product_attention") is _original_attention
        ):
            vars(module)["scaled_dot_product_attention"] = _dispatch


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
        self.keys, self.values = (mx.zeros(shape, self._dtype) for shape in self._shapes)

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        where = step.once(("device slots", self._group), lambda: _to_device(step.slots(self._group)))
        self.keys[where] = keys.squeeze(2)
        self.values[where] = values.squeeze(2)

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        out = []
        for start, end, where, mask in step.once(
            ("reads", self._group, window), lambda: self._reads(step, window)
        ):
            keys, values = self.keys[where], self.values[where]
            rows = queries[start:end]  # [rows, heads, 1, head_dim]
            if chunk := keys.ndim == 3:  # one sequence's rows: [1, heads, rows, head_dim]
                rows, keys, values = rows.transpose(2, 1, 0, 3), keys[None], values[None]
            result = mx.fast.scaled_dot_product_attention(
                rows, keys.swapaxes(1, 2), values.swapaxes(1, 2), scale=scale, mask=mask, sinks=sinks
            )
            out.append(result.transpose(2, 1, 0, 3) if chunk else result)
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=0)

    def _reads(self, step: Step, window: int | None) -> list[_Read]:
        """(first row, end row, key slots, mask): decode rows in buckets, all else by segment."""
        reads: list[_Read] = []
        alone = step.segments[step.num_decodes :]
        for bucket in step.decode_buckets():
            if len(bucket) == 1:  # reads a slice where its blocks are consecutive
                alone = [*bucket, *alone]
                continue
            slots, lengths = step.padded_slots(bucket, self._group, window)
            padding = np.arange(slots.shape[1])[None] >= lengths[:, None]
            mask = mx.array(~padding)[:, None, None] if padding.any() else None
            reads.append((bucket[0].start, bucket[-1].end, mx.array(slots), mask))
        for segment in alone:
            first = segment.first_key(window)
            where = _to_device(step.key_slots(segment, self._group, first))
            reads.append((segment.start, segment.end, where, _mask(segment, first, window)))
        return sorted(reads, key=lambda read: read[0])


_Read = tuple[int, int, slice | mx.array, mx.array | str | None]


def _to_device(slots: slice | np.ndarray) -> slice | mx.array:
    return slots if isinstance(slots, slice) else mx.array(slots)


def _mask(segment: Segment, first: int, window: int | None) -> mx.array | str | None:
    if segment.num_rows == 1:
        return None
    if window is None or segment.context_len - first <= window:
        return "causal"
    return mx.array(visible(segment, first, window))
