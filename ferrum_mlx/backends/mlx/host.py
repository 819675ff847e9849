"""The CPU route: Linear layers and attention through numpy's BLAS.

MLX's CPU wheel for Linux multiplies at about 3 GFLOP/s in float32; numpy's wheel carries an OpenBLAS
that is some thirty times faster, and MLX's CPU arrays lend numpy their memory. Layers are switched by
changing the class of the leaf modules, as quantizing does; the model classes stay as they are.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ferrum_mlx.backends.mlx.step import Segment, Step, visible

GEMM_ROWS = 8  # OpenBLAS rounds a row alike in any matrix of at least this many rows


def matmul(x: np.ndarray, weight: np.ndarray, exact: bool) -> np.ndarray:
    """x [rows, in] · weight [out, in] transposed → [rows, out].

    A single row takes the faster matrix-vector routine, which rounds differently, unless `exact`:
    then few rows are padded, so that a row's result does not depend on how many there are.
    """
    rows = len(x)
    if exact and rows < GEMM_ROWS:
        x = np.concatenate([x, np.zeros((GEMM_ROWS - rows, x.shape[1]), x.dtype)])
    product: np.ndarray = x @ weight.T
    return product[:rows]


class HostLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _apply(self, x)
        return y + self["bias"] if "bias" in self else y


class HostEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _apply(self, x)


_HOST_CLASS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: HostLinear, nn.Embedding: HostEmbedding}


def _apply(module: HostLinear | HostEmbedding, x: mx.array) -> mx.array:
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    y = matmul(rows, module.host_weight, module.exact)
    return mx.array(y.reshape(*x.shape[:-1], y.shape[-1]))


def use_host_matmul(model: nn.Module, exact: bool) -> None:
    """Switch every float32 Linear and tied Embedding of a model; its weights are shared, not copied."""
    for module in model.modules():
        if type(module) in _HOST_CLASS and module.weight.dtype == mx.float32:
            mx.eval(module.weight)
            module.__class__ = _HOST_CLASS[type(module)]
            module.host_weight = np.asarray(module.weight)
            module.exact = exact


class HostStorage:
    """Pools in host memory, `[slots, kv_heads, head_dim]` float32; writes are plain assignments."""

    def __init__(
        self, group: int, num_slots: int, key_shape: tuple[int, int], value_shape: tuple[int, int]
    ) -> None:
        self._group = group
        self.keys = np.zeros((num_slots, *key_shape), dtype=np.float32)
        self.values = np.zeros((num_slots, *value_shape), dtype=np.float32)

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def arrays(self) -> list[mx.array]:
        return []

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        where = step.slots(self._group)
        self.keys[where] = np.asarray(keys)[:, :, 0]
        self.values[where] = np.asarray(values)[:, :, 0]

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        rows = np.asarray(queries)[:, :, 0] * np.float32(scale)  # [T, heads, head_dim]
        sink = None if sinks is None else np.asarray(sinks.astype(mx.float32))
        out = np.empty((*rows.shape[:2], self.values.shape[-1]), dtype=np.float32)
        for segment in step.segments:
            first = segment.first_key(window)
            where = step.key_slots(segment, self._group, first)
            hidden = step.once(("hidden", segment, window), partial(_hidden, segment, first, window))
            out[segment.start : segment.end] = attention(
                rows[segment.start : segment.end], self.keys[where], self.values[where], hidden, sink
            )
        return mx.array(out[:, :, None])


def _hidden(segment: Segment, first: int, window: int | None) -> np.ndarray | None:
    return None if segment.num_rows == 1 else ~visible(segment, first, window)


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    hidden: np.ndarray | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """softmax(q · k) · v of one sequence.

    Args:
        queries: [rows, heads, head_dim], already scaled; heads is a multiple of kv_heads.
        keys, values: [length, kv_heads, head_dim or value_dim].
        hidden: [rows, length] bool, True where a row does not see a key; None sees all.
        sinks: [heads], one logit a head that takes part in the softmax without a value.

    Returns:
        [rows, heads, value_dim]
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    by_head = queries.reshape(rows, kv_heads, groups, head_dim).transpose(1, 2, 0, 3)
    keys_by_head = keys.transpose(1, 2, 0)
    scores = (
        by_head.reshape(kv_heads, groups * rows, head_dim) @ keys_by_head
    )  # [kv_heads, groups·rows, length]
    if hidden is not None:
        np.copyto(scores.reshape(kv_heads, groups, rows, -1), -np.inf, where=hidden)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = np.repeat(sinks.reshape(kv_heads, groups), rows, axis=1)[..., None]
        top = np.maximum(top, sink)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sink - top)
    out: np.ndarray = scores @ values.transpose(1, 0, 2)  # [kv_heads, groups·rows, value_dim]
    out /= total
    return out.reshape(kv_heads, groups, rows, -1).transpose(2, 0, 1, 3).reshape(rows, heads, -1)
