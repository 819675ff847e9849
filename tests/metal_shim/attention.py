"""Attention of decode and verify rows: random cases, and what they are by numpy, a row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.mlx.kernels.launch import How, RowTables


@dataclass(frozen=True)
class Kind:
    """A kind of layer, and the sequences that attend in one call: their contexts and rows."""

    contexts: Sequence[int]
    rows: Sequence[int]
    dtype: mx.Dtype = mx.float32
    kv_heads: int = 2
    group: int = 1
    dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Case:
    kind: Kind
    queries: mx.array
    keys: mx.array
    values: mx.array
    blocks: list[list[int]]  # of each sequence
    how: How

    def tables(self) -> RowTables:
        """As the kernel wants them; built here anew, so that a fault of tables.py is no fault of both."""
        kind, entries, lists, row = self.kind, list[int](), list[int](), 0
        for count, context, blocks in zip(kind.rows, kind.contexts, self.blocks, strict=True):
            entries += [row, count, context, 4 * len(kind.rows) + len(lists)]
            lists += blocks
            row += count
        spans = [
            min(context, kind.window + count - 1) if kind.window else context
            for context, count in zip(kind.contexts, kind.rows, strict=True)
        ]
        array = mx.array([*entries, *lists, *[0] * 8], dtype=mx.int32)
        return RowTables(0, row, array, len(kind.rows), max(kind.rows), max(spans), kind.block_size)


def make_case(kind: Kind, seed: int = 0) -> Case:
    """Blocks in any order; what no row may read is NaN: the null block, what a window has left, the rest."""
    rng = np.random.default_rng(seed)
    lengths = [-(-context // kind.block_size) for context in kind.contexts]
    order = iter((1 + rng.permutation(sum(lengths) + 3)).tolist())
    blocks = [[next(order) for _ in range(length)] for length in lengths]
    value_dim = kind.value_dim or kind.dim
    slots = (sum(lengths) + 4) * kind.block_size
    keys = np.full((slots, kind.kv_heads, kind.dim), np.nan, np.float32)
    values = np.full((slots, kind.kv_heads, value_dim), np.nan, np.float32)
    for table, context, count in zip(blocks, kind.contexts, kind.rows, strict=True):
        first = max(0, context - count - kind.window + 1) if kind.window else 0
        table[: first // kind.block_size] = [0] * (first // kind.block_size)
        own = [slot(table, position, kind.block_size) for position in range(first, context)]
        keys[own] = rng.standard_normal((len(own), *keys.shape[1:]))
        values[own] = rng.standard_normal((len(own), *values.shape[1:]))
    queries = rng.standard_normal((sum(kind.rows), kind.heads, kind.dim)).astype(np.float32)
    sinks = mx.array(rng.standard_normal(kind.heads).astype(np.float32)).astype(kind.dtype)
    return Case(
        kind,
        *(mx.array(array).astype(kind.dtype) for array in (queries, keys, values)),
        blocks,
        How(1.5 * kind.dim**-0.5, kind.window, sinks if kind.sinks else None, kind.softcap),
    )


def slot(table: Sequence[int], position: int, block_size: int) -> int:
    return table[position // block_size] * block_size + position % block_size


def by_rows(case: Case) -> np.ndarray:
    """[rows, heads, value_dim] in float64."""
    kind, how = case.kind, case.how
    queries, keys, values = (
        np.array(a.astype(mx.float32), dtype=np.float64) for a in (case.queries, case.keys, case.values)
    )
    out = []
    for table, context, count in zip(case.blocks, kind.contexts, kind.rows, strict=True):
        for position in range(context - count, context):
            first = max(0, position - kind.window + 1) if kind.window else 0
            seen = [slot(table, p, kind.block_size) for p in range(first, position + 1)]
            k, v = (np.repeat(pool[seen], kind.group, axis=1) for pool in (keys, values))
            scores = np.einsum("hd,nhd->hn", queries[len(out)], k) * how.scale
            if how.softcap:
                scores = how.softcap * np.tanh(scores / how.softcap)
            weights = np.exp(scores)
            total = weights.sum(1)
            if how.sinks is not None:
                total += np.exp(np.array(how.sinks.astype(mx.float32), dtype=np.float64))
            out.append(np.einsum("hn,nhd->hd", weights, v) / total[:, None])
    return np.array(out)
