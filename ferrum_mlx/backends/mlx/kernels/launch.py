"""How the Metal kernels are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ferrum_mlx.backends.mlx.kernels.source import ATTEND, MERGE, Source

MAX_ROWS = (
    16  # of a sequence: a decode row is one, a verify segment its drafts besides; longer ones are chunks
)
MOST_DIM = 256  # elements of a head: a lane keeps a thirty-second of some in registers
_SIMDS = 8  # simdgroups of a threadgroup
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Inferred from the register file and the core counts of Apple's GPUs, not measured (bench/NOTES.md).
_ELEMENTS, _MOST_VECTORS = 512, 8  # of queries in a threadgroup
_THREADGROUPS = 128  # keys are split until a launch has so many,
_SPLIT_KEYS = 256  # as long as a split has so many keys


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """Rows start … end - 1 of a step and where their keys lie.

    Attributes:
        entries: int32, in ATTEND's order, rows counted from `start`. At least 8: MLX puts fewer into another
            address space, and compiles once more for that.
        sequences: how many have rows here.
        most: rows of the sequence with most.
        span: keys that the rows of one sequence read, at most.
    """

    start: int
    end: int
    entries: mx.array
    sequences: int
    most: int
    span: int
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class How:
    """How a layer attends.

    Attributes:
        softcap: scores become softcap · tanh(score / softcap). No layer asks for it: mlx-lm's classes with a
            softcap compute their scores themselves, and run one sequence at a time (loop.py).
        sinks: [heads], one logit a head that takes part in the softmax without a value.
    """

    scale: float
    window: int | None
    sinks: mx.array | None
    softcap: float | None = None


class MetalAttention:
    """`metal_kernel` stands in for MLX's own where there is no Metal."""

    def __init__(self, metal_kernel: Callable[..., Any] = mx.fast.metal_kernel) -> None:
        self._attend, self._merge = (_made(metal_kernel, source) for source in (ATTEND, MERGE))
        self._numbers: dict[tuple[float, float], mx.array] = {}

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, tables: RowTables, how: How
    ) -> mx.array:
        """queries [rows, heads, head_dim], pools [slots, kv_heads, …] → [rows, heads, value_dim]."""
        (rows, heads, dim), (_, kv_heads, value_dim) = queries.shape, values.shape
        group = heads // kv_heads
        vectors, tiles = _tiling(group, tables.most, max(dim, value_dim))
        splits = _splits(tiles * kv_heads * tables.sequences, tables.span)
        whole = splits == 1
        numbers = self._given(how)
        sinks = numbers if how.sinks is None else how.sinks  # an array, which is not read
        out: mx.array
        merged: mx.array
        out, stats = self._attend(
            inputs=[queries, keys, values, tables.entries, numbers, sinks],
            template=[
                *(("T", queries.dtype), ("OUT", queries.dtype if whole else mx.float32)),
                *(("D", dim), ("DV", value_dim), ("KV_HEADS", kv_heads), ("GROUP", group)),
                *(("BLOCK", tables.block_size), ("VECTORS", vectors), ("SIMDS", _SIMDS)),
                *(("WINDOW", how.window or 0), ("CAPPED", how.softcap is not None)),
                *(("SINKS", how.sinks is not None), ("WHOLE", whole)),
            ],
            grid=(32 * tiles * kv_heads, _SIMDS * tables.sequences, splits),
            threadgroup=(32, _SIMDS, 1),
            output_shapes=[(rows, heads, splits, value_dim), (1,) if whole else (rows, heads, splits, 2)],
            output_dtypes=[queries.dtype if whole else mx.float32, mx.float32],
        )
        if whole:
            return out.squeeze(2)
        (merged,) = self._merge(
            inputs=[out, stats, sinks],
            template=[("T", queries.dtype), ("DV", value_dim), ("SINKS", how.sinks is not None)],
            grid=(32, heads, rows),
            threadgroup=(32, 1, 1),
            output_shapes=[(rows, heads, value_dim)],
            output_dtypes=[queries.dtype],
        )
        return merged

    def _given(self, how: How) -> mx.array:
        key = how.scale, how.softcap or 0.0
        if key not in self._numbers:
            self._numbers[key] = mx.array([*key, *[0.0] * 6])
        return self._numbers[key]


def _made(metal_kernel: Callable[..., Any], source: Source) -> Any:
    # Pools and whatever lies in rows are taken as they are; queries that do not are copied.
    return metal_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        ensure_row_contiguous=True,
    )


def refusal(
    heads: int, queries: mx.Dtype, pool: mx.Dtype, key_shape: tuple[int, int], value_shape: tuple[int, int]
) -> str | None:
    """Why the kernel cannot serve layers of such a kind; None if it can. Shapes are (kv_heads, head_dim)."""
    if max(key_shape[1], value_shape[1]) > MOST_DIM or 0 in (key_shape[1], value_shape[1]):
        return f"heads of {key_shape[1]} and {value_shape[1]} elements; supported: 1 to {MOST_DIM}"
    if queries != pool or pool not in _DTYPES:
        return f"queries in {queries} over keys in {pool}"
    if heads % key_shape[0]:
        return f"{heads} query heads over {key_shape[0]} KV heads"
    return None


def _tiling(group: int, most_rows: int, dim: int) -> tuple[int, int]:
    """Query vectors in a threadgroup, and tiles of so many for a sequence with that many rows."""
    most = max(1, min(_MOST_VECTORS, _ELEMENTS // dim))
    if most_rows > 1:  # one size for any number of rows, as each is compiled
        return most, -(-group * most_rows // most)
    tiles = -(-group // most)
    return -(-group // tiles), tiles


def _splits(threadgroups: int, span: int) -> int:
    return max(1, min(span // _SPLIT_KEYS, _THREADGROUPS // threadgroups))
