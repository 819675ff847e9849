"""K and V in 8 or 4 bits, in host memory: what mx.quantize computes, in numpy."""

from __future__ import annotations

import numpy as np

from ferrum_mlx.kv.precision import GROUP, groups_of

_LEAST_SCALE = np.float32(1e-7)  # MLX's own


class HostPool:
    """Reads and writes like a float32 array [slots, heads, head_dim], and keeps `bits` a number."""

    def __init__(self, num_slots: int, shape: tuple[int, int], bits: int) -> None:
        heads, head_dim = shape
        groups = groups_of(head_dim)
        self.shape, self._bits = (num_slots, heads, head_dim), bits
        self._codes = np.zeros((num_slots, heads, groups * GROUP * bits // 8), dtype=np.uint8)
        self._scales, self._biases = (np.zeros((num_slots, heads, groups), np.float32) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._biases.nbytes

    def __setitem__(self, where: slice | np.ndarray, rows: np.ndarray) -> None:
        codes, self._scales[where], self._biases[where] = quantize(rows, self._bits)
        self._codes[where] = codes if self._bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)

    def __getitem__(self, where: slice | np.ndarray) -> np.ndarray:
        codes = self._codes[where]
        if self._bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        return dequantize(codes, self._scales[where], self._biases[where], self.shape[-1])

    def whole(self, num_slots: int) -> np.ndarray:
        """For the check at load: what can stand in its place, and keeps every bit."""
        return np.zeros((num_slots, *self.shape[1:]), np.float32)

    def read_back(self, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the check at load: what is read of rows written to slots, and the rows rounded."""
        self[slots] = rows
        return self[slots], dequantize(*quantize(rows, self._bits), self.shape[-1])


def quantize(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[…, head_dim] float32 → codes […, groups · GROUP] uint8, scales and biases […, groups].

    The number that is farther from zero is kept as it is, and so is zero, if the group reaches it.
    """
    *before, head_dim = rows.shape
    groups = groups_of(head_dim)
    padded = np.zeros((*before, groups * GROUP), dtype=np.float32)
    padded[..., :head_dim] = rows
    values = padded.reshape(*before, groups, GROUP)
    low, high = values.min(axis=-1), values.max(axis=-1)
    most = np.float32(2**bits - 1)
    scales = np.maximum((high - low) / most, _LEAST_SCALE)
    from_low = np.abs(low) > np.abs(high)
    scales = np.where(from_low, scales, -scales)
    edges = np.where(from_low, low, high)
    steps = np.rint(edges / scales)  # from zero to the edge
    flat = steps == 0
    scales = np.where(flat, scales, edges / np.where(flat, np.float32(1), steps))
    biases = np.where(flat, np.float32(0), edges)
    codes = np.clip(np.rint((values - biases[..., None]) / scales[..., None]), 0, most).astype(np.uint8)
    return codes.reshape(*before, -1), scales, biases


def dequantize(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, head_dim: int) -> np.ndarray:
    """[…, head_dim] float32, of what `quantize` gives."""
    values = codes.reshape(*scales.shape, GROUP).astype(np.float32)
    values *= scales[..., None]
    values += biases[..., None]
    rows: np.ndarray = values.reshape(*scales.shape[:-1], -1)[..., :head_dim]
    return rows
