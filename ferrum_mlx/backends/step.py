"""One step's metadata, built once and read by every layer.

Rows are packed: row t of a step is one token of one sequence, whatever its kind. Decode rows come
first, by length of context, so that similar ones can attend together; a chunk or a verify item is a
segment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from ferrum_mlx.batch import IN_FLIGHT, UnifiedBatch, UnifiedItem
from ferrum_mlx.kv.manager import KVManager

V = TypeVar("V")
LONG_RUN = 64  # keys that are worth a product of their own; shorter runs are gathered


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start … end - 1 of a step: consecutive tokens of one sequence from `pos_offset` on."""

    cache_id: int
    start: int
    end: int
    pos_offset: int

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def context_len(self) -> int:
        """Keys that the last row attends to, its own included."""
        return self.pos_offset + self.num_rows

    def first_key(self, window: int | None) -> int:
        """First position that any row attends to."""
        return 0 if window is None else max(0, self.pos_offset - window + 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Keys start … end - 1 of those that a segment attends to, as they are read, lie in consecutive slots."""

    slots: slice
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyBlocks:
    """The blocks [n, most] of n sequences, filled up with the null block; `seen` [n, most · block_size] bool
    are the slots in them that are attended to."""

    blocks: np.ndarray
    seen: np.ndarray

    @property
    def block_size(self) -> int:
        return int(self.seen.shape[1] // self.blocks.shape[1])


class Step:
    """Arrays are numpy int32; T is the number of rows, R the number that reach the output head.

    Args:
        adapters: by cache, which LoRA adapter its rows go through, from 1; the others go through none.
    """

    def __init__(self, batch: UnifiedBatch, kv: KVManager, adapters: Mapping[int, int] | None = None) -> None:
        self._kv, self._adapters = kv, adapters or {}
        order = sorted(range(len(batch.items)), key=lambda i: _rank(batch.items[i]))
        self.segments: list[Segment] = []
        self.items: list[UnifiedItem] = []  # in row order
        rows: list[int] = []
        start = 0
        for item in (batch.items[i] for i in order):
            end = start + len(item.q_tokens)
            self.segments.append(Segment(item.cache_id, start, end, item.pos_offset))
            self.items.append(item)
            rows += range(end - item.num_rows_out, end)
            start = end
        self._order = order
        self.num_tokens = start
        self.num_decodes = sum(segment.num_rows == 1 for segment in self.segments)
        self.rows = np.array(rows, dtype=np.int32)  # [R]
        self._made: dict[Hashable, Any] = {}

    def in_batch_order(self, by_row: Sequence[V]) -> list[V]:
        """Undo the row order: entry i of the result belongs to item i of the batch."""
        ranked = sorted(zip(self._order, by_row, strict=True), key=lambda pair: pair[0])
        return [value for _, value in ranked]

    @cached_property
    def token_ids(self) -> np.ndarray:
        """[T]; IN_FLIGHT where `awaited` says whose token it is."""
        return np.array([t for item in self.items for t in item.q_tokens], dtype=np.int32)

    @cached_property
    def awaited(self) -> dict[int, int]:
        """Row → cache, where the id is the last one that the launch before samples for that cache."""
        pairs = zip(self.segments, self.items, strict=True)
        return {segment.start: item.cache_id for segment, item in pairs if item.q_tokens == (IN_FLIGHT,)}

    @cached_property
    def sampled_last(self) -> dict[int, int]:
        """Cache → index of the last one of its tokens among all that the step samples."""
        counts = [item.num_sampled for item in self.items]
        ends = zip(self.items, counts, accumulate(counts), strict=True)
        return {item.cache_id: end - 1 for item, count, end in ends if count}

    @cached_property
    def positions(self) -> np.ndarray:
        """[T], absolute in each sequence."""
        return np.concatenate([np.arange(s.pos_offset, s.context_len, dtype=np.int32) for s in self.segments])

    def adapter_rows(self, start: int = 0, end: int | None = None) -> list[tuple[int, np.ndarray | None]]:
        """The adapters of rows start … end - 1, each with its rows, counted from `start`; None is all."""
        if not self._adapters:
            return []
        numbers = self._adapter_numbers[start:end]
        found = [number for number in dict.fromkeys(numbers.tolist()) if number]
        rows = [np.flatnonzero(numbers == number).astype(np.int32) for number in found]
        return [(n, None if len(r) == len(numbers) else r) for n, r in zip(found, rows, strict=True)]

    @cached_property
    def _adapter_numbers(self) -> np.ndarray:
        """[T]; 0 is none."""
        numbers = [self._adapters.get(segment.cache_id, 0) for segment in self.segments]
        return np.repeat(np.array(numbers, dtype=np.int32), [segment.num_rows for segment in self.segments])

    def slots(self, group: int) -> slice | np.ndarray:
        """[T]: where each row's K and V go, as a slice if the slots are consecutive."""
        return self.once(("slots", group), lambda: as_run(self._row_slots(group)))

    def key_slots(self, segment: Segment, group: int, first: int) -> slice | np.ndarray:
        """[context_len - first]: where the K and V of positions first … context_len - 1 are."""
        return self.once(
            ("keys", segment.cache_id, group, first), lambda: as_run(self._at(segment, group, first))
        )

    def key_runs(self, segment: Segment, group: int, window: int | None) -> list[Run]:
        """Where the keys that a segment attends to lie; none if that is in many places.

        Blocks that all of its rows see whole come in the order of their slots: a pool that was used up once
        hands out runs of blocks from its end to its start, which are one run that way.
        """
        size, end = self.block_size, segment.context_len
        skipped = (first := segment.first_key(window)) % size  # keys of the first block
        table = self.block_table(segment, group)[first // size : -(-end // size)]
        blocks = np.array(table, dtype=np.int32)
        if segment.num_rows == 1 or window is None:
            seen_by_all = end - segment.num_rows + 1
            blocks[bool(skipped) : max(seen_by_all // size - first // size, 0)].sort()
        edges = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
        if len(edges) > 2 and len(edges) * LONG_RUN > end - first:
            return []
        runs = []
        for a, b in pairwise(edges):
            start, stop = max(a * size - skipped, 0), min(b * size - skipped, end - first)
            slot = int(blocks[a]) * size + start - (a * size - skipped)
            runs.append(Run(slice(slot, slot + stop - start), start, stop))
        return runs

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    def block_table(self, segment: Segment, group: int) -> list[int]:
        """The blocks of the segment's sequence, the null block where a window has left one."""
        return self._kv.block_table(segment.cache_id, group)

    def key_blocks(self, segments: Sequence[Segment], group: int, window: int | None) -> KeyBlocks:
        """Where sequences keep what their rows attend to, as whole blocks."""
        size = self.block_size
        firsts = [segment.first_key(window) for segment in segments]
        tables = [
            self.block_table(segment, group)[first // size : -(-segment.context_len // size)]
            for segment, first in zip(segments, firsts, strict=True)
        ]
        blocks = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        seen = np.zeros((len(tables), blocks.shape[1] * size), dtype=bool)
        for i, (segment, first, table) in enumerate(zip(segments, firsts, tables, strict=True)):
            blocks[i, : len(table)] = table
            start = first // size * size
            seen[i, first - start : segment.context_len - start] = True
        return KeyBlocks(blocks, seen)

    def decode_buckets(self) -> list[list[Segment]]:
        """The decode rows in runs of similar context, so that padding at most doubles what is read."""
        buckets: list[list[Segment]] = []
        for segment in self.segments[: self.num_decodes]:
            if buckets and segment.context_len <= 2 * buckets[-1][0].context_len:
                buckets[-1].append(segment)
            else:
                buckets.append([segment])
        return buckets

    def state_slot(self, segment: Segment) -> int:
        """Which slot holds the state of the segment's sequence."""
        return self._kv.state_slot(segment.cache_id)

    def padded_slots(
        self, bucket: Sequence[Segment], group: int, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Key slots of decode rows, padded with the null block's, [n, longest]; their lengths, [n]."""
        rows = [self._at(segment, group, segment.first_key(window)) for segment in bucket]
        lengths = np.array([len(row) for row in rows])
        slots = np.zeros((len(rows), lengths.max()), dtype=np.int32)
        for i, row in enumerate(rows):
            slots[i, : len(row)] = row
        return slots, lengths

    def once(self, key: Hashable, make: Callable[[], V]) -> V:
        """make()'s value, made by the first layer that asks and kept for the others."""
        if key not in self._made:
            self._made[key] = make()
        value: V = self._made[key]
        return value

    def _row_slots(self, group: int) -> np.ndarray:
        return np.concatenate([self._at(segment, group, segment.pos_offset) for segment in self.segments])

    def _at(self, segment: Segment, group: int, first: int) -> np.ndarray:
        return self._kv.slot_mapping(segment.cache_id, group, first, segment.context_len)


def _rank(item: UnifiedItem) -> tuple[bool, int]:
    return len(item.q_tokens) > 1, item.pos_offset


def as_run(slots: np.ndarray) -> slice | np.ndarray:
    """As a slice if they are consecutive."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def window_of(*windows: int | None) -> int | None:
    """The narrowest of several windows."""
    return min((w for w in windows if w is not None), default=None)


def visible(segment: Segment, first: int, window: int | None) -> np.ndarray:
    """[rows, context_len - first] bool: which keys each row of a segment attends to."""
    queries = np.arange(segment.pos_offset, segment.context_len)[:, None]
    keys = np.arange(first, segment.context_len)[None]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
