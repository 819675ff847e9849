"""Flat pools of K and V on torch's device, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from ferrum_mlx.backends.step import Run, Segment, Step, visible
from ferrum_mlx.backends.torch.device import send, upload
from ferrum_mlx.backends.torch.layers import LayerKV, Shape
from ferrum_mlx.backends.torch.quantized import QuantizedPool

Place: TypeAlias = slice | torch.Tensor  # slots of a pool: consecutive ones, or any [n] int64
KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # [n, kv_heads, length, …] each
FEW_ROWS = 16  # of a segment; more of them are worth one copy of scattered keys


class PagedStorage(Protocol):
    """K and V of one layer; queries, keys and values come as models hand them to attention."""

    def write(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a step's K and V, [1, kv_heads, T, head_dim], into their slots, in place."""
        ...

    def attend(
        self,
        step: Step,
        queries: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """queries [1, heads, T, head_dim] → [1, T, heads, value_dim]."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows start … end - 1 of a step and what they attend to.

    Attributes:
        rows: queries a sequence; end - start is a multiple of it.
        where: key slots; [sequences · length] if there are several sequences; runs are read as they lie.
        mask: added to the scores, [sequences or 1, 1, rows, length]; None sees all.
        causal: the mask is the plain triangle of a prompt from its first token on.
    """

    start: int
    end: int
    rows: int
    where: Place | list[Run]
    mask: torch.Tensor | None = None
    causal: bool = False


class PoolStorage:
    """Flat pools `[slots, kv_heads, head_dim]`, K and V apart; consecutive slots are read as a view.

    Where they keep fewer bits, rows attend to what is left, those of the step that writes it included.

    Attributes:
        dtype: of the model's queries, keys and values.
    """

    def __init__(self, group: int, num_slots: int, layer: LayerKV, device: torch.device) -> None:
        self._group, self._window, self.dtype = group, layer.window, layer.dtype
        self.keys: Any  # a tensor, or what reads and writes like one
        self.values: Any
        self.keys, self.values = (
            new_pool(num_slots, shape, layer.kept or layer.dtype, device)
            if layer.bits is None
            else QuantizedPool((num_slots, *shape), layer.dtype, device)
            for shape in (layer.key_shape, layer.value_shape)
        )

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def write(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        where = step.once(("device slots", self._group), lambda: self._to_device(step.slots(self._group)))
        for pool, given in ((self.keys, keys), (self.values, values)):
            new = given.squeeze(0).transpose(0, 1)
            if isinstance(where, slice) or pool.device.type == "mps":  # torch 2.6 has no index_copy_ there
                pool[where] = new
            else:
                pool.index_copy_(0, where, new.to(pool.dtype))

    def attend(
        self,
        step: Step,
        queries: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        reads: list[Read] = step.once(("reads", self._group, self._window), lambda: self._reads(step))
        out = [self._attend_read(read, queries, scale, softcap, sinks) for read in reads]
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def _attend_read(
        self,
        read: Read,
        queries: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Of a step's queries those of the read: [1, end - start, heads, value_dim]."""
        rows = queries
        if (taking := read.end - read.start) < queries.shape[2]:
            rows = rows.narrow(2, read.start, taking)
        if isinstance(read.where, list):
            parts = [self._keys_and_values(run.slots) for run in read.where]
            return explicit_attention(rows, parts, read.mask, scale, softcap, sinks).transpose(1, 2)
        keys, values = self._keys_and_values(read.where)
        if (many := taking // read.rows) > 1:  # [1, heads, many · rows, …] → [many, heads, rows, …]
            rows, keys, values = (
                array.squeeze(0).unflatten(1, (many, -1)).transpose(0, 1) for array in (rows, keys, values)
            )
        result = attention(rows, keys, values, read, scale, softcap, sinks).transpose(1, 2)
        return result if many == 1 else result.flatten(0, 1).unsqueeze(0)

    def _keys_and_values(self, where: Place) -> KeysAndValues:
        parts = (taken(pool, where).to(self.dtype) for pool in (self.keys, self.values))
        keys, values = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        return keys, values

    def _reads(self, step: Step) -> list[Read]:
        """Decode rows in buckets, all else by segment."""
        reads: list[Read] = []
        alone = step.segments[step.num_decodes :]
        for bucket in step.decode_buckets():
            if len(bucket) == 1:  # reads a view where its blocks are consecutive
                alone = [*bucket, *alone]
                continue
            slots, lengths = step.padded_slots(bucket, self._group, self._window)
            seen = np.arange(slots.shape[1])[None] < lengths[:, None]
            mask = None if seen.all() else self._mask(seen[:, None])
            where = self._to_device(slots.reshape(-1))
            reads.append(Read(bucket[0].start, bucket[-1].end, 1, where, mask))
        reads += [self._read_of(step, segment) for segment in alone]
        return sorted(reads, key=lambda read: read.start)

    def _read_of(self, step: Step, segment: Segment) -> Read:
        first = segment.first_key(self._window)
        rows, length = segment.num_rows, segment.context_len - first
        cut = self._window is not None and length > self._window
        causal = rows > 1 and rows == length and not cut
        mask = None
        if rows > 1 and not causal:
            mask = self._mask(visible(segment, first, self._window)[None])
        return Read(segment.start, segment.end, rows, self._where(step, segment, first), mask, causal)

    def _where(self, step: Step, segment: Segment, first: int) -> Place | list[Run]:
        where = step.key_slots(segment, self._group, first)
        if isinstance(where, slice):
            return where
        on_host = isinstance(self.keys, torch.Tensor) and self.keys.device.type == "cpu"
        few = on_host and segment.num_rows <= FEW_ROWS
        runs = step.key_runs(segment, self._group, self._window) if few else []
        return runs or self._to_device(where)

    def _to_device(self, slots: slice | np.ndarray) -> Place:
        if isinstance(slots, slice):
            return slots
        return upload(slots.astype(np.int64), self.keys.device)

    def _mask(self, seen: np.ndarray) -> torch.Tensor:
        """[sequences, rows, length] bool → what is added to scores."""
        added = torch.zeros(seen.shape, dtype=self.dtype)
        added.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return send(added[:, None], self.keys.device)


def new_pool(num_slots: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU a head's slots follow one another: the products of attention go over one head at a time."""
    heads, head_dim = shape
    if device.type == "cpu":
        return torch.zeros(heads, num_slots, head_dim, dtype=dtype).transpose(0, 1)
    return torch.zeros(num_slots, heads, head_dim, dtype=dtype, device=device)


def taken(pool: Any, where: Place) -> torch.Tensor:
    """[n, kv_heads, head_dim], laid out as the pool is."""
    if isinstance(where, slice):
        return pool[where]
    if isinstance(pool, torch.Tensor) and not pool.is_contiguous():
        return pool.transpose(0, 1).index_select(1, where).transpose(0, 1)
    return pool.index_select(0, where)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    read: Read,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q · k) · v; queries [n, heads, rows, head_dim], keys and values [n, kv_heads, length, …]."""
    # torch's own attention on MPS: a crash over shared kv heads in 2.6, later wrong where values are narrower
    if softcap is not None or sinks is not None or queries.device.type == "mps":
        return explicit_attention(queries, [(keys, values)], _mask_of(read, queries), scale, softcap, sinks)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=read.mask, is_causal=read.causal, scale=scale, enable_gqa=True
    )


def _mask_of(read: Read, queries: torch.Tensor) -> torch.Tensor | None:
    if not read.causal:
        return read.mask
    row = torch.arange(read.rows, device=queries.device)
    return torch.where(row[:, None] < row, -torch.inf, 0.0).to(queries.dtype)[None, None]


def explicit_attention(
    queries: torch.Tensor,
    parts: Sequence[KeysAndValues],
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `attention`, step by step, with a cap on the scores and with sinks.

    Args:
        parts: keys and values, one piece behind the other.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: [heads], one logit a head that takes part in the softmax without a value.
    """
    n, heads, rows, _ = queries.shape
    kv_heads = parts[0][0].shape[1]
    # the queries of a kv head together
    folded = (queries * scale).reshape(n, kv_heads, -1, queries.shape[-1])
    scores = torch.cat([folded @ keys.transpose(2, 3) for keys, _ in parts], dim=-1)
    scores = scores.reshape(n, heads, rows, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(n, -1, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(queries.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    by_head = weights.reshape(n, kv_heads, heads // kv_heads * rows, -1)
    lengths = [values.shape[2] for _, values in parts]
    out = [w @ values for w, (_, values) in zip(by_head.split(lengths, dim=-1), parts, strict=True)]
    return sum(out[1:], out[0]).reshape(n, heads, rows, -1)
