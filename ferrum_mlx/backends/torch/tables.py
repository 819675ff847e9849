"""Attention through block tables that lie on the device: what a kernel computes, and its plain form.

Nothing of it needs a length on the host, so that it can be captured once and replayed at any length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ferrum_mlx.backends.step import Segment, Step
from ferrum_mlx.backends.torch.device import upload
from ferrum_mlx.backends.torch.layers import LayerKV
from ferrum_mlx.backends.torch.pools import PoolStorage, Read, explicit_attention

MAX_ROWS = 16  # a decode row has one, a verify segment its drafts besides; longer ones are chunks


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """Some sequences of a step, S in number; tensors are int64.

    Attributes:
        starts: [S], each one's first row in the step.
        counts: [S], its rows, from 1 to max_rows.
        contexts: [S], keys its last row sees, its own included; 0 is a padding row that sees none.
        firsts: [S], where its block table begins in `blocks`.
        width: most blocks that a table can have.
        made: what a kernel has made of the tables, for other layers.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    firsts: torch.Tensor
    blocks: torch.Tensor
    max_rows: int
    width: int
    block_size: int
    made: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class How:
    """How a layer attends; see pools.attention."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class PagedAttention(Protocol):
    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: RowTables,
        out: torch.Tensor,
        how: How,
    ) -> None:
        """Write the rows of `tables` into out, [T, heads, value_dim]; other rows stay as they are.

        queries are [T, heads, head_dim]; keys and values flat pools, [slots, kv_heads, …].
        """
        ...


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    out: torch.Tensor,
    how: How,
) -> None:
    """PagedAttention in plain torch: gathers as many keys as the longest table could have."""
    device = queries.device
    block_size = tables.block_size
    key = torch.arange(tables.width * block_size, device=device)
    at = (tables.firsts[:, None] + key // block_size).clamp(0, len(tables.blocks) - 1)
    slots = tables.blocks[at] * block_size + key % block_size  # [S, keys]
    row = torch.arange(tables.max_rows, device=device)
    rows = (tables.starts[:, None] + row).clamp(max=len(queries) - 1)  # [S, max_rows]
    position = (tables.contexts - tables.counts)[:, None] + row
    seen = key <= position[..., None]
    if how.window is not None:
        seen &= key > position[..., None] - how.window
    mask = torch.zeros_like(seen, dtype=queries.dtype).masked_fill_(~seen, -torch.inf)[:, None]
    result = explicit_attention(
        queries[rows].transpose(1, 2),
        [(keys[slots].transpose(1, 2), values[slots].transpose(1, 2))],
        mask,
        how.scale,
        how.softcap,
        how.sinks,
    ).transpose(1, 2)
    result = torch.where(seen.any(-1)[..., None, None], result, 0)
    if tables.max_rows == 1:
        out.index_copy_(0, rows[:, 0], result[:, 0].to(out.dtype))
    else:
        real = row < tables.counts[:, None]
        out[rows[real]] = result[real].to(out.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a step attends in one pool: some rows through tables, the others by reads."""

    tables: RowTables | None
    reads: Sequence[Read] = ()


class TableStorage(PoolStorage):
    """A pool whose decode and verify rows attend through block tables, once it is given a kernel."""

    def __init__(self, group: int, num_slots: int, layer: LayerKV, device: torch.device) -> None:
        super().__init__(group, num_slots, layer, device)
        self.kernel: PagedAttention | None = None
        self.quantized = layer.bits is not None
        self.asked: tuple[int, How] | None = None  # query heads, and how they last attended

    def attend(
        self,
        step: Step,
        queries: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        how = How(scale, self._window, softcap, sinks)
        self.asked = queries.shape[1], how
        if self.kernel is None:
            return super().attend(step, queries, scale, softcap, sinks)
        plan: Plan = step.once(("plan", self._group, self._window), lambda: self._plan(step))
        rows = queries[0].transpose(0, 1)
        out = queries.new_empty(*rows.shape[:2], self.values.shape[2])
        if plan.tables is not None:
            self.kernel(rows, self.keys, self.values, plan.tables, out, how)
        for read in plan.reads:
            out[read.start : read.end] = self._attend_read(read, queries, scale, softcap, sinks)[0]
        return out[None]

    def _plan(self, step: Step) -> Plan:
        short = [segment for segment in step.segments if segment.num_rows <= MAX_ROWS]
        reads = [self._read_of(step, s) for s in step.segments if s.num_rows > MAX_ROWS]
        if not short:
            return Plan(None, reads)
        tables = step.once(
            ("tables", self._group), lambda: row_tables(step, short, self._group, self.keys.device)
        )
        return Plan(tables, reads)


def row_tables(step: Step, segments: Sequence[Segment], group: int, device: torch.device) -> RowTables:
    """The tables of some segments of a step, sent to the device in one piece."""
    tables = [step.block_table(segment, group) for segment in segments]
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    given = np.concatenate(
        [
            np.array([(s.start, s.num_rows, s.context_len) for s in segments], dtype=np.int64).T.reshape(-1),
            np.cumsum(lengths) - lengths,
            *(np.array(table, dtype=np.int64) for table in tables),
        ]
    )
    count = len(segments)
    starts, counts, contexts, firsts, blocks = upload(given, device).split([count] * 4 + [sum(lengths)])
    most = max(segment.num_rows for segment in segments)
    return RowTables(
        starts,
        counts,
        contexts,
        firsts,
        blocks,
        max_rows=1 if most == 1 else MAX_ROWS,
        width=int(lengths.max()),
        block_size=step.block_size,
    )
