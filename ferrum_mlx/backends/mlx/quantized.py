"""K and V in 8 or 4 bits, on MLX's device: pools, and the same rounding for mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from ferrum_mlx.backends.mlx.pools import PoolStorage
from ferrum_mlx.kv.precision import GROUP, groups_of

Packed = tuple[mx.array, mx.array, mx.array]  # codes, 32 / bits of them a uint32; scales, biases […, groups]


class QuantizedPool:
    """Reads and writes like an array [slots, heads, head_dim] of `dtype`, and keeps `bits` a number."""

    def __init__(self, shape: tuple[int, int, int], dtype: mx.Dtype, bits: int) -> None:
        self.shape, self._bits = shape, bits
        slots, heads, head_dim = shape
        groups = groups_of(head_dim)
        self.codes = mx.zeros((slots, heads, groups * GROUP * bits // 32), mx.uint32)
        self.scales, self.biases = (mx.zeros((slots, heads, groups), dtype) for _ in range(2))

    @property
    def arrays(self) -> list[mx.array]:
        return [self.codes, self.scales, self.biases]

    @property
    def size(self) -> int:
        return self.codes.size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __setitem__(self, where: slice | mx.array, rows: mx.array) -> None:
        if self.size:
            self.codes[where], self.scales[where], self.biases[where] = packed(rows, self._bits)

    def __getitem__(self, where: slice | mx.array) -> mx.array:
        """[…, heads, head_dim] for slots […]."""
        parts = self.codes[where], self.scales[where], self.biases[where]
        return unpacked(parts, self.shape[-1], self._bits)

    def whole(self, num_slots: int) -> mx.array:
        """For the check at load: what can stand in its place, and keeps every bit."""
        return mx.zeros((num_slots, *self.shape[1:]), self.scales.dtype)

    def read_back(self, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the check at load: what is read of rows written to slots, and the rows rounded."""
        where, given = mx.array(slots), mx.array(rows).astype(self.scales.dtype)
        self[where] = given
        mx.eval(self.arrays)
        got, want = self[where], rounded(given, self._bits)
        return np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32))


class QuantizedStorage(PoolStorage):
    """Rows attend to what the pools give back, those of the step that writes it included."""

    def __init__(
        self,
        group: int,
        num_slots: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        dtype: mx.Dtype,
        bits: int,
    ) -> None:
        self.bits = bits
        super().__init__(group, num_slots, key_shape, value_shape, dtype)

    def reset(self) -> None:
        self.keys, self.values = (QuantizedPool(shape, self._dtype, self.bits) for shape in self._shapes)

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def pool_bytes(self) -> list[int]:
        """Of the codes, which might be copied alone; the rest is written alike, and too small to tell."""
        return [self.keys.codes.nbytes, self.values.codes.nbytes]

    def arrays(self) -> list[mx.array]:
        """Also while whole pools stand in."""
        return [array for pool in (self.keys, self.values) for array in _arrays_of(pool)]


def _arrays_of(pool: QuantizedPool | mx.array) -> list[mx.array]:
    return pool.arrays if isinstance(pool, QuantizedPool) else [pool]


def packed(rows: mx.array, bits: int) -> Packed:
    """[…, head_dim] → its codes, and a scale and a bias for each group."""
    missing = -rows.shape[-1] % GROUP
    if missing:
        rows = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    codes, scales, biases = mx.quantize(rows, group_size=GROUP, bits=bits)
    return codes, scales, biases


def unpacked(parts: Packed, head_dim: int, bits: int) -> mx.array:
    codes, scales, biases = parts
    rows = mx.dequantize(codes, scales, biases, group_size=GROUP, bits=bits)
    return rows if rows.shape[-1] == head_dim else rows[..., :head_dim]


def rounded(rows: mx.array, bits: int) -> mx.array:
    """What a pool gives back for what was written."""
    return unpacked(packed(rows, bits), rows.shape[-1], bits) if rows.size else rows


def round_what_is_kept(caches: Sequence[Any], bits: int) -> None:
    """Make mlx-lm's own caches keep what our pools would: the reference for a model with quantized KV."""
    for cache in caches:
        if isinstance(cache, CacheList):
            round_what_is_kept(cache.caches, bits)
        elif hasattr(cache, "update_and_fetch"):
            cache.update_and_fetch = _rounding(cache.update_and_fetch, bits)


def _rounding(update: Callable[..., Any], bits: int) -> Callable[..., Any]:
    return lambda keys, values: update(rounded(keys, bits), rounded(values, bits))
