"""Which rows of a step attend through block tables, and those tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.mlx.kernels.launch import MAX_ROWS, How, MetalAttention, RowTables
from ferrum_mlx.backends.mlx.pools import PoolStorage, Read
from ferrum_mlx.backends.step import Segment, Step


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """How a layer last attended, and with which queries."""

    heads: int
    dtype: mx.Dtype
    how: How


class TableStorage(PoolStorage):
    """A pool whose decode and verify rows attend through block tables, once it is given a kernel."""

    kernel: MetalAttention | None = None
    asked: Asked | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(kv_heads, head_dim) of keys and of values."""
        (_, *keys), (_, *values) = self.keys.shape, self.values.shape
        return (keys[0], keys[1]), (values[0], values[1])

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        how = How(scale, window, sinks)
        self.asked = Asked(queries.shape[1], queries.dtype, how)
        if self.kernel is None:
            return super().attend(step, queries, window, scale, sinks)
        out = []
        for part in step.once(("parts", self._group, window), lambda: self._parts(step, window)):
            if isinstance(part, RowTables):
                rows = queries[part.start : part.end].squeeze(2)
                out.append(self.kernel(rows, self.keys, self.values, part, how)[:, :, None])
            else:
                out.append(self._attend_read(part, queries, scale, sinks))
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=0)

    def _parts(self, step: Step, window: int | None) -> list[RowTables | Read]:
        """In row order: decodes, then verify segments and chunks as they come."""
        parts: list[RowTables | Read] = []
        for most, run in groupby(step.segments, key=_most_rows):
            if most:
                parts.append(row_tables(step, list(run), self._group, window))
            else:
                parts += [self._read_of(step, segment, window) for segment in run]
        return parts


def _most_rows(segment: Segment) -> int:
    """Of the kernel's variant for such segments; 0 if it has none."""
    return 0 if segment.num_rows > MAX_ROWS else 1 if segment.num_rows == 1 else MAX_ROWS


def row_tables(step: Step, segments: Sequence[Segment], group: int, window: int | None) -> RowTables:
    """The tables of consecutive segments of a step, sent to the device in one piece."""
    tables = [np.array(step.block_table(segment, group), dtype=np.int32) for segment in segments]
    start, at = segments[0].start, 4 * len(segments)
    rows = []
    for segment, table in zip(segments, tables, strict=True):
        rows.append((segment.start - start, segment.num_rows, segment.context_len, at))
        at += len(table)
    entries = np.concatenate([np.array(rows, dtype=np.int32).reshape(-1), *tables])
    return RowTables(
        start,
        segments[-1].end,
        mx.array(np.pad(entries, (0, max(0, 8 - len(entries))))),
        sequences=len(segments),
        most=max(segment.num_rows for segment in segments),
        span=max(segment.context_len - segment.first_key(window) for segment in segments),
        block_size=step.block_size,
    )
