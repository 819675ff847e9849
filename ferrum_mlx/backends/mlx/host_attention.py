"""The CPU route, attention: pools in host memory, products through numpy's BLAS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.mlx.host_quantized import HostPool
from ferrum_mlx.backends.step import KeyBlocks, Run, Segment, Step, as_run, visible

_Part: TypeAlias = tuple[slice | np.ndarray, "list[list[Run]] | KeyBlocks"]  # rows, and what they read


class HostStorage:
    """Pools in host memory, `[slots, kv_heads, head_dim]` float32; writes are plain assignments.

    In memory a head's slots follow one another: the products of attention go over one head at a time.

    `exact` attends row by row, so that a row rounds alike in a chunk and alone. With `bits` a number, rows
    attend to what is left of K and V then, those of the step that writes them included.
    """

    def __init__(
        self,
        group: int,
        num_slots: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        exact: bool,
        bits: int | None = None,
    ) -> None:
        self._group, self._exact = group, exact
        self.keys, self.values = (_pool(num_slots, shape, bits) for shape in (key_shape, value_shape))

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def pool_bytes(self) -> list[int]:
        return []

    def arrays(self) -> list[mx.array]:
        return []

    def reset(self) -> None:
        """Nothing to do: a write is over when it returns."""

    def write(self, step: Step, keys: mx.array, values: mx.array) -> None:
        where = step.slots(self._group)
        self.keys[where] = np.asarray(keys)[:, :, 0]
        self.values[where] = np.asarray(values)[:, :, 0]

    def extend(
        self, step: Step, segment: Segment, window: int | None, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        own = step.key_slots(segment, self._group, segment.pos_offset)
        self.keys[own] = np.asarray(keys)[0].swapaxes(0, 1)
        self.values[own] = np.asarray(values)[0].swapaxes(0, 1)
        seen = (self._seen(pool, step, segment, window) for pool in (self.keys, self.values))
        new_keys, new_values = map(_heads_first, seen)
        return new_keys, new_values

    def attend(
        self, step: Step, queries: mx.array, window: int | None, scale: float, sinks: mx.array | None
    ) -> mx.array:
        rows = np.asarray(queries)[:, :, 0] * np.float32(scale)  # [T, heads, head_dim]
        sink = None if sinks is None else np.asarray(sinks.astype(mx.float32))
        out = np.empty((*rows.shape[:2], self.values.shape[-1]), dtype=np.float32)
        attend = self._attend_by_row if self._exact else self._attend_segment
        alone = step.segments
        if not self._exact:
            alone = step.segments[step.num_decodes :]
            parted = step.once(("decode reads", self._group, window), lambda: self._parted(step, window))
            for where, reads in parted:
                if isinstance(reads, KeyBlocks):
                    out[where] = self._attend_gathered(reads, rows[where], sink)
                else:
                    out[where] = self._attend_in_place(reads, rows[where], sink)
        for segment in alone:
            part = slice(segment.start, segment.end)
            out[part] = attend(step, segment, rows[part], window, sink)
        return mx.array(out[:, :, None])

    def _parted(self, step: Step, window: int | None) -> list[_Part]:
        """The decode rows: of sequences of similar length those whose keys lie in a few long runs, which are
        read as they are, and those whose blocks have to be gathered."""
        parts: list[_Part] = []
        for bucket in step.decode_buckets():
            runs = {segment: step.key_runs(segment, self._group, window) for segment in bucket}
            near = [segment for segment in bucket if runs[segment]]
            far = [segment for segment in bucket if not runs[segment]]
            if near:
                parts.append((_rows_of(near), [runs[segment] for segment in near]))
            if far:
                parts.append((_rows_of(far), step.key_blocks(far, self._group, window)))
        return parts

    def _attend_in_place(
        self, reads: Sequence[Sequence[Run]], rows: np.ndarray, sinks: np.ndarray | None
    ) -> np.ndarray:
        """Products where the keys of each sequence lie, the softmax of all at once."""
        heads, value_dim = self.values.shape[1:]
        by_head = rows.reshape(len(rows), heads, -1, rows.shape[-1])  # [sequences, kv_heads, group, head_dim]
        longest = max(runs[-1].end for runs in reads)
        scores = np.empty((*by_head.shape[:3], longest), dtype=np.float32)
        for query, runs, score in zip(by_head, reads, scores, strict=True):
            for run in runs:
                keys = self.keys[run.slots].transpose(1, 2, 0)
                np.matmul(query, keys, out=score[..., run.start : run.end])
            score[..., runs[-1].end :] = -np.inf
        total = softmax_(scores, None if sinks is None else sinks.reshape(heads, -1, 1))
        out = np.empty((*by_head.shape[:3], value_dim), dtype=np.float32)
        for weights, runs, result in zip(scores, reads, out, strict=True):
            np.matmul(weights[..., : runs[0].end], self.values[runs[0].slots].swapaxes(0, 1), out=result)
            for run in runs[1:]:
                result += weights[..., run.start : run.end] @ self.values[run.slots].swapaxes(0, 1)
        out /= total
        return out.reshape(len(rows), -1, value_dim)

    def _attend_gathered(self, reads: KeyBlocks, rows: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
        """One product for all sequences, over copies of their blocks."""
        heads, value_dim = self.values.shape[1:]
        hidden = ~reads.seen
        by_head = rows.reshape(len(rows), heads, -1, rows.shape[-1]).swapaxes(0, 1)
        scores = by_head @ self._gathered(self.keys, reads).swapaxes(2, 3)
        np.copyto(scores, -np.inf, where=hidden[:, None])  # [kv_heads, sequences, group, slots]
        total = softmax_(scores, None if sinks is None else sinks.reshape(heads, 1, -1, 1))
        values = self._gathered(self.values, reads)
        values[:, hidden] = 0  # whoever had the slot before may have left what is no number
        out: np.ndarray = scores @ values
        out /= total
        return out.swapaxes(0, 1).reshape(len(rows), -1, value_dim)

    def _gathered(self, pool: np.ndarray | HostPool, reads: KeyBlocks) -> np.ndarray:
        """A copy of the blocks: [kv_heads, sequences, most · block_size, head_dim]."""
        size = reads.block_size
        if isinstance(pool, HostPool):
            slots = reads.blocks[..., None] * size + np.arange(size, dtype=np.int32)
            return pool[slots.reshape(reads.seen.shape)].transpose(2, 0, 1, 3)
        slots, heads, dim = pool.shape
        by_block = pool.swapaxes(0, 1).reshape(heads, slots // size, size, dim)
        return by_block.take(reads.blocks, axis=1).reshape(heads, *reads.seen.shape, dim)

    def _seen(
        self, pool: np.ndarray | HostPool, step: Step, segment: Segment, window: int | None
    ) -> np.ndarray:
        """What a segment attends to, [context_len - first key, kv_heads, head_dim]: as it lies, or a copy."""
        first = segment.first_key(window)
        where = step.key_slots(segment, self._group, first)
        if isinstance(where, slice):
            return pool[where]
        key = "key blocks", segment, self._group, window
        reads = step.once(key, lambda: step.key_blocks([segment], self._group, window))
        start = first % reads.block_size
        return self._gathered(pool, reads)[:, 0].swapaxes(0, 1)[start : start + segment.context_len - first]

    def _attend_segment(
        self, step: Step, segment: Segment, rows: np.ndarray, window: int | None, sinks: np.ndarray | None
    ) -> np.ndarray:
        first = segment.first_key(window)
        hidden = step.once(("hidden", segment, window), partial(_hidden, segment, first, window))
        keys, values = (self._seen(pool, step, segment, window) for pool in (self.keys, self.values))
        return attention(rows, keys, values, hidden, sinks)

    def _attend_by_row(
        self, step: Step, segment: Segment, rows: np.ndarray, window: int | None, sinks: np.ndarray | None
    ) -> np.ndarray:
        """Each row over exactly the keys it sees: its rounding does not depend on its company."""
        first = segment.first_key(window)
        keys, values = (self._seen(pool, step, segment, window) for pool in (self.keys, self.values))
        out = []
        for i in range(segment.num_rows):
            position = segment.pos_offset + i
            seen = slice(0 if window is None else max(0, position - window + 1 - first), position + 1 - first)
            out.append(attention(rows[i : i + 1], keys[seen], values[seen], None, sinks))
        return np.concatenate(out)


def _pool(num_slots: int, shape: tuple[int, int], bits: int | None) -> np.ndarray | HostPool:
    if bits is not None:
        return HostPool(num_slots, shape, bits)
    heads, head_dim = shape
    return np.zeros((heads, num_slots, head_dim), dtype=np.float32).swapaxes(0, 1)


def _rows_of(segments: Sequence[Segment]) -> slice | np.ndarray:
    return as_run(np.array([segment.start for segment in segments]))


def _heads_first(rows: np.ndarray) -> mx.array:
    """[length, kv_heads, head_dim] → [1, kv_heads, length, head_dim], a copy."""
    return mx.array(rows.swapaxes(0, 1)[None])


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
    sink = None if sinks is None else np.repeat(sinks.reshape(kv_heads, groups), rows, axis=1)[..., None]
    total = softmax_(scores, sink)
    out: np.ndarray = scores @ values.transpose(1, 0, 2)  # [kv_heads, groups·rows, value_dim]
    out /= total
    return out.reshape(kv_heads, groups, rows, -1).transpose(2, 0, 1, 3).reshape(rows, heads, -1)


def softmax_(scores: np.ndarray, sink: np.ndarray | None) -> np.ndarray:
    """exp of the scores [..., length] in their place, up to a factor; returns their sums [..., 1].

    Args:
        sink: [..., 1], one more score that only the sum has.
    """
    top = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    scores -= top
    np.exp(scores, out=scores)
    total: np.ndarray = scores.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    return total
