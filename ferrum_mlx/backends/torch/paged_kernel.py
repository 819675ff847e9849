"""Paged attention of decode and verify rows, in Triton: K and V are read where they lie.

A program takes a tile of one sequence's rows, with all query heads of one kv head, and one split of the
keys; where there are several splits, a second kernel merges them. The grid follows from shapes alone and
lengths are read on the device, so a captured graph is right at any length. tables.py has the same function
in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ferrum_mlx.backends.torch.tables import How, RowTables

_TILE_BYTES = 16384  # of K, and of V, in a tile: two of each in flight fit the shared memory of any GPU
_MOST_SPLITS = 64  # a row's partial results are merged in one tile


@triton.jit
def _keys_a_split(span, SPLITS: tl.constexpr, TILE_N: tl.constexpr):
    return tl.cdiv(span, SPLITS * TILE_N) * TILE_N


@triton.jit
def _sequence(counts, contexts, seq, WINDOW: tl.constexpr):
    """Its rows, the position of the first, the first key that any sees, and how many there are from it."""
    count = tl.load(counts + seq).to(tl.int32)
    context = tl.load(contexts + seq).to(tl.int32)
    lowest = tl.maximum(context - count - WINDOW + 1, 0) if WINDOW else 0
    return count, context - count, lowest, context - lowest


@triton.jit
def _with_sink(peak, total, sinks, head, live):
    """The largest score and the sum of weights, a sink's logit among them, and what weights shrink by."""
    sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
    largest = tl.maximum(peak, sink)
    shrink = tl.exp(peak - largest)
    return total * shrink + tl.exp(sink - largest), shrink


@triton.jit
def _attend(
    queries, keys, values, out, peaks, totals, sinks,
    starts, counts, contexts, firsts, blocks,
    scale, q_row, q_head, k_slot, k_head, v_slot, v_head, o_row, o_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, MAX_ROWS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    seq, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    kv_head, split = tl.program_id(1), tl.program_id(2)
    count, offset, lowest, span = _sequence(counts, contexts, seq, WINDOW)
    begin = lowest + split * _keys_a_split(span, SPLITS, TILE_N)
    end = tl.minimum(begin + _keys_a_split(span, SPLITS, TILE_N), lowest + span)
    if (tile * ROWS >= count) | ((SPLITS > 1) & (begin >= end)):
        return

    m, dk, dv = tl.arange(0, TILE_M), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    row, head = tile * ROWS + m // GROUP, kv_head * GROUP + m % GROUP
    live = (m < ROWS * GROUP) & (row < count)
    position = offset + row
    at = (tl.load(starts + seq) + row) * q_row + head * q_head
    q = tl.load(queries + at[:, None] + dk[None, :], mask=live[:, None] & (dk < DK)[None, :], other=0.0)
    table = blocks + tl.load(firsts + seq)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DV_PAD], tl.float32)

    for first in range(begin, end, TILE_N):
        key = first + tl.arange(0, TILE_N)
        inside = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        k_at = slot * k_slot + kv_head * k_head
        k = tl.load(keys + k_at[None, :] + dk[:, None], mask=inside[None, :] & (dk < DK)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP > 0:
            small = tl.exp(tl.abs(scores) * (-2 / SOFTCAP))
            bent = SOFTCAP * (1 - small) / (1 + small)  # tanh of what is not negative
            scores = tl.where(scores < 0, -bent, bent)
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)  # a row may see no key of a tile
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(peak - base)
        v_at = slot * v_slot + kv_head * v_head
        v_mask = inside[:, None] & (dv < DV)[None, :]
        v = tl.load(values + v_at[:, None] + dv[None, :], mask=v_mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = largest

    wanted = live[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        if SINKS:
            total, shrink = _with_sink(peak, total, sinks, head, live)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # a padding row sees nothing
        at = (tl.load(starts + seq) + row) * o_row + head * o_head
        tl.store(out + at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=wanted)
    else:  # [sequence, row, head, split]
        part = ((seq * MAX_ROWS + row) * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(out + part[:, None] * DV + dv[None, :], acc, mask=wanted)
        tl.store(peaks + part, peak, mask=live)
        tl.store(totals + part, total, mask=live)


@triton.jit
def _merge(
    parts, peaks, totals, out, sinks, starts, counts, contexts, o_row, o_head,
    MAX_ROWS: tl.constexpr, SPLITS: tl.constexpr, TILE_N: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    seq, row, head = tl.program_id(0) // MAX_ROWS, tl.program_id(0) % MAX_ROWS, tl.program_id(1)
    count, _, _, span = _sequence(counts, contexts, seq, WINDOW)
    if row >= count:
        return
    split, dv = tl.arange(0, SPLITS), tl.arange(0, DV_PAD)
    used = split * _keys_a_split(span, SPLITS, TILE_N) < span
    part = (tl.program_id(0) * tl.num_programs(1) + head) * SPLITS + split
    peak = tl.load(peaks + part, mask=used, other=float("-inf"))
    total = tl.load(totals + part, mask=used, other=0.0)
    acc = tl.load(
        parts + part[:, None] * DV + dv[None, :], mask=used[:, None] & (dv < DV)[None, :], other=0.0
    )
    largest = tl.max(peak, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    shrink = tl.exp(peak - base)
    summed, weight = tl.sum(acc * shrink[:, None], 0), tl.sum(total * shrink, 0)
    if SINKS:
        weight, shrink = _with_sink(base, weight, sinks, head, True)
        summed = summed * shrink
    summed = summed / tl.where(weight == 0, 1.0, weight)
    at = (tl.load(starts + seq) + row) * o_row + head * o_head
    tl.store(out + at + dv, summed.to(out.dtype.element_ty), mask=dv < DV)


class TritonAttention:
    """`programs`: how many a launch should have to keep the device busy; keys are split to get there."""

    def __init__(self, programs: int) -> None:
        self._programs = programs

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: RowTables,
        out: torch.Tensor,
        how: How,
    ) -> None:
        """See tables.attend."""
        heads, dk = queries.shape[1:]
        kv_heads, dv = values.shape[1:]
        if queries.stride(-1) != 1:
            queries = queries.contiguous()
        group, sequences, max_rows = heads // kv_heads, len(tables.starts), tables.max_rows
        tile_m = max(triton.next_power_of_2(group), min(64, triton.next_power_of_2(group * max_rows)), 16)
        rows = min(max_rows, tile_m // group)
        tiles = triton.cdiv(max_rows, rows)
        dk_pad, dv_pad = (max(16, triton.next_power_of_2(dim)) for dim in (dk, dv))
        tile_n = min(64, max(16, _TILE_BYTES // (max(dk_pad, dv_pad) * keys.element_size())))
        splits = self._splits(sequences * tiles * kv_heads, tables.width * tables.block_size // tile_n)
        shape = {"MAX_ROWS": max_rows, "SPLITS": splits, "TILE_N": tile_n, "DV": dv, "DV_PAD": dv_pad}
        kind = {"WINDOW": how.window or 0, "SINKS": how.sinks is not None}
        sinks = queries if how.sinks is None else how.sinks  # a pointer, which is not followed
        parts = peaks = totals = out
        if splits > 1:
            parts = out.new_empty(sequences * max_rows, heads, splits, dv, dtype=torch.float32)
            peaks, totals = (parts.new_empty(parts.shape[:3]) for _ in range(2))
        _attend[(sequences * tiles, kv_heads, splits)](
            queries, keys, values, parts, peaks, totals, sinks,
            tables.starts, tables.counts, tables.contexts, tables.firsts, tables.blocks,
            how.scale, *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
            BLOCK_SIZE=tables.block_size, GROUP=group, ROWS=rows, TILES=tiles, TILE_M=tile_m,
            DK=dk, DK_PAD=dk_pad, SOFTCAP=how.softcap or 0.0, **shape, **kind,
            num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        if splits > 1:
            _merge[(sequences * max_rows, heads)](
                parts, peaks, totals, out, sinks,
                tables.starts, tables.counts, tables.contexts, *out.stride()[:2], **shape, **kind,
                enable_fp_fusion=True,
            )  # fmt: skip

    def _splits(self, programs: int, most: int) -> int:
        """A power of four, as each number is compiled; at most `most`, the tiles of the longest context."""
        wanted = max(1, min(_MOST_SPLITS, most, self._programs // programs))
        return 4 ** ((wanted.bit_length() - 1) // 2)
