"""The CPU route, layers: products, norms and rotary embeddings through numpy.

MLX's CPU wheel for Linux multiplies at about 3 GFLOP/s in float32; numpy's wheel carries an OpenBLAS
that is some thirty times faster, and MLX's CPU arrays lend numpy their memory. Norms and rotary
embeddings are here because each hand-over to MLX's worker thread costs more than they do. Layers are
switched by changing the class of the leaf modules, as quantizing does; the model classes stay as they
are. Weights are shared, not copied.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

TILE = 16  # rows of every product in exact numerics
FEW, SOME = 3, 32  # rows up to which another way is quicker: bench/NOTES.md
STRIP = 4096  # rows of a weight that a cache holds while a few rows of x go over it


def matmul(x: np.ndarray, weight: np.ndarray, exact: bool) -> np.ndarray:
    """x [rows, in] · weight [out, in] transposed → [rows, out].

    A BLAS picks its routine, and so its rounding, by the shape of a product. `exact` therefore
    multiplies tiles of TILE rows, the last one padded: a row meets the same routine in any company. They
    are the right factor: as the left one, OpenBLAS's AVX2 kernel rounds a row by its place among 16.
    """
    if not exact:
        return _quickest(x, weight)
    rows = len(x)
    padded = np.zeros((-(-rows // TILE) * TILE, x.shape[1]), x.dtype)
    padded[:rows] = x
    out = np.empty((len(padded), len(weight)), x.dtype)
    for start in range(0, rows, TILE):
        out[start : start + TILE] = (weight @ padded[start : start + TILE].T).T
    return out[:rows]


def _quickest(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The same whatever the shapes but for rounding: OpenBLAS is slow with few rows on the left."""
    rows = len(x)
    if 1 < rows <= FEW:
        out = np.empty((rows, len(weight)), x.dtype)
        for start in range(0, len(weight), STRIP):
            strip = slice(start, start + STRIP)
            for row, column in zip(x, out, strict=True):
                np.dot(weight[strip], row, out=column[strip])
        return out
    product: np.ndarray = (weight @ x.T).T if FEW < rows <= SOME else x @ weight.T
    return product


class HostLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class HostEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class HostRMSNorm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        rows = _host(x)
        mean_square = np.square(rows).mean(axis=-1, keepdims=True)
        return mx.array(rows / np.sqrt(mean_square + np.float32(self.eps)) * self.host_weight)


class HostRoPE(nn.RoPE):
    """x [batch, heads, length, head_dim]; offset is a number, or an array [batch] of first positions."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rows = _host(x)
        first = np.asarray(offset, dtype=np.float32).reshape(-1, 1)
        positions = (first + np.arange(x.shape[2], dtype=np.float32)) * np.float32(self.scale)
        angles = positions[:, None, :, None] * self.host_weight  # [batch or 1, 1, length, dims / 2]
        cos, sin = np.cos(angles), np.sin(angles)
        half = self.dims // 2
        a, b = _halves(self.traditional, self.dims, half)
        out = rows.copy()
        out[..., a] = rows[..., a] * cos - rows[..., b] * sin
        out[..., b] = rows[..., a] * sin + rows[..., b] * cos
        return mx.array(out)


def use_host_layers(model: nn.Module, exact: bool) -> None:
    """Switch the layers of a float32 model; those of another dtype keep MLX's own."""
    for module in model.modules():
        kind = type(module)
        if kind is nn.RoPE:
            module.host_weight = _inverse_frequencies(module)
            module.__class__ = HostRoPE
        elif kind in _HOST_CLASS and module.weight.dtype == mx.float32:
            mx.eval(module.weight)
            module.host_weight = np.asarray(module.weight)
            module.exact = exact
            module.__class__ = _HOST_CLASS[kind]


_HOST_CLASS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: HostLinear,
    nn.Embedding: HostEmbedding,
    nn.RMSNorm: HostRMSNorm,
}


def _host(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32))


def _product(module: HostLinear | HostEmbedding, x: mx.array) -> mx.array:
    y = matmul(_host(x).reshape(-1, x.shape[-1]), module.host_weight, module.exact)
    return mx.array(y.reshape(*x.shape[:-1], y.shape[-1]))


def _halves(traditional: bool, dims: int, half: int) -> tuple[slice, slice]:
    """Which elements are rotated against which: neighbours, or the two halves."""
    if traditional:
        return slice(0, dims, 2), slice(1, dims, 2)
    return slice(0, half), slice(half, dims)


def _inverse_frequencies(rope: nn.RoPE) -> np.ndarray:
    """[dims / 2], by MLX's own exp: at large positions an ulp here is an angle of 1e-4."""
    half = rope.dims // 2
    return np.array(mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half)))
