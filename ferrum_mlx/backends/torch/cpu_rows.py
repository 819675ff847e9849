"""Norms and rotary embeddings of a few rows on a CPU, compiled by numba: one call for six of torch's.

Each row is computed by itself, in the same order whatever is beside it. What the compiled code does not take
goes through torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit

from ferrum_mlx.backends.torch.cpu_kernel import OPTIONS, pointer_to


class Norm:
    """weight · x / sqrt(mean(x²) + epsilon), over the last dimension."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if weight.shape != (size,) or not (_is_plain(x) and _is_plain(weight)):
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._epsilon))
        out = torch.empty_like(x)
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        _normed(*pointers, x.numel() // max(size, 1), size, self._epsilon)
        return out


class Rotation:
    """x · cos + (-b, a) · sin, where a is x[..., :half], and b the rest of it.

    It is called with x, [1, heads, T, head_dim], in memory in any order of heads and T, and cos and sin of
    the T rows.
    """

    def __init__(self, half: int) -> None:
        self._half = half

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        shape = (1, 1, *x.shape[2:])
        fits = x.dim() == 4 and len(x) == 1 and x.shape[3] == 2 * self._half and x.dtype == torch.float32
        lies = x.stride(-1) == out.stride(-1) == 1
        if not (fits and lies and all(_is_plain(t) and t.shape == shape for t in (cos, sin))):
            a, b = x[..., : self._half], x[..., self._half :]
            return x * cos + torch.cat([-b, a], dim=-1) * sin
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        _rotated(*pointers, tuple(x.shape[1:]), x.stride()[1:3], out.stride()[1:3])
        return out


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


@njit(**OPTIONS)
def _normed(x: Any, weight: Any, out: Any, rows: int, size: int, epsilon: Any) -> None:
    """Addresses of x and out, [rows, size], and of weight, [size]."""
    number = np.float32(0)
    given = carray(pointer_to(x, number), (rows, size))
    scales = carray(pointer_to(weight, number), (size,))
    results = carray(pointer_to(out, number), (rows, size))
    for i in range(rows):
        total = np.float64(0)  # in float32 an ill-conditioned row is half as far off again
        for j in range(size):
            total += np.float64(given[i, j]) ** 2
        factor = np.float32(1 / np.sqrt(total / size + epsilon))
        for j in range(size):
            results[i, j] = scales[j] * (given[i, j] * factor)


@njit(**OPTIONS)
def _rotated(
    x: Any, cos: Any, sin: Any, out: Any, shape: tuple[int, ...], steps: tuple[int, ...], out_steps: Any
) -> None:
    """Addresses of x and out, whose heads and tokens lie `steps` apart, and of cos and sin.

    `shape` is heads, T and head_dim.
    """
    number = np.float32(0)
    heads, tokens, size = shape
    last = (heads - 1, tokens - 1)
    given = carray(pointer_to(x, number), (last[0] * steps[0] + last[1] * steps[1] + size,))
    results = carray(pointer_to(out, number), (last[0] * out_steps[0] + last[1] * out_steps[1] + size,))
    cosines = carray(pointer_to(cos, number), (tokens, size))
    sines = carray(pointer_to(sin, number), (tokens, size))
    half = size // 2
    for t in range(tokens):
        for head in range(heads):
            a, c = head * steps[0] + t * steps[1], head * out_steps[0] + t * out_steps[1]
            b, d = a + half, c + half
            for i in range(half):
                results[c + i] = given[a + i] * cosines[t, i] - given[b + i] * sines[t, i]
                results[d + i] = given[b + i] * cosines[t, half + i] + given[a + i] * sines[t, half + i]
