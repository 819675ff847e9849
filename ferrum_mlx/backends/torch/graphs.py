"""Decode and verify steps that are captured once and replayed: one launch instead of a thousand.

A replay repeats what the device did, at the same addresses, and runs no Python. So a captured step reads
everything that differs between steps out of buffers on the device, and a forward that looks at a value on
the host cannot be captured. A step has a size and as many rows, each with a context of its own, whosever
they are; fewer are padded with rows that see no key and write to the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.capture import Capture, HostReads
from ferrum_mlx.backends.torch.device import upload
from ferrum_mlx.backends.torch.packed import PackedModel
from ferrum_mlx.backends.torch.tables import Plan, RowTables, TableStorage
from ferrum_mlx.errors import one_line

V = TypeVar("V")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest logit


class DecodeBuffers:
    """What a step of up to `rows` rows reads, int64, always at the same addresses.

    One array: sections of `rows` entries (ids, positions, contexts, then the slots and the table starts of
    each group), and behind them the block tables of all groups.

    Args:
        width: most blocks of a sequence's table.
    """

    def __init__(self, rows: int, groups: int, width: int, block_size: int, device: torch.device) -> None:
        self._rows, self._groups, self.width, self.block_size = rows, groups, width, block_size
        self._header = (3 + 2 * groups) * rows
        self._all = torch.zeros(self._header + groups * rows * width, dtype=torch.int64, device=device)
        self._sections = self._all[: self._header].view(-1, rows)
        self.ids, self.positions, self._contexts = self._sections[:3]
        self._starts = torch.arange(rows, device=device)
        self._counts = torch.ones_like(self._starts)

    def slots(self, group: int, size: int) -> torch.Tensor:
        return self._sections[3 + group, :size]

    def tables(self, group: int, size: int) -> RowTables:
        return RowTables(
            self._starts[:size],
            self._counts[:size],
            self._contexts[:size],
            self._sections[3 + self._groups + group, :size],
            self._all[self._header :],
            max_rows=1,
            width=self.width,
            block_size=self.block_size,
        )

    def load(
        self,
        positions: np.ndarray,
        owners: np.ndarray,
        tables: Sequence[Sequence[list[int]]],
        ids: torch.Tensor,
    ) -> None:
        """Take a step in; rows behind its own become padding.

        Args:
            positions: [n] of the rows, which see the keys up to their own.
            owners: [n], whose table a row goes by.
            tables: of each group the block tables of all sequences.
            ids: [n], on the device: they may still be on their way.
        """
        n = len(positions)
        lengths = np.array([[len(table) for table in group] for group in tables], dtype=np.int64)
        firsts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
        sent = np.zeros(self._header + int(lengths.sum()), dtype=np.int64)
        sections, blocks = sent[: self._header].reshape(-1, self._rows), sent[self._header :]
        for group, starts in zip(tables, firsts, strict=True):
            for table, start in zip(group, starts, strict=True):
                blocks[start : start + len(table)] = table
        own = firsts[:, owners]
        slots = blocks[own + positions // self.block_size] * self.block_size + positions % self.block_size
        sections[1, :n], sections[2, :n] = positions, positions + 1
        sections[3 : 3 + self._groups, :n], sections[3 + self._groups :, :n] = slots, own
        self._all[: len(sent)].copy_(upload(sent, self._all.device))
        self.ids[:n].copy_(ids)


class _StaticStep(Step):
    """A step of which the host knows but the size: what layers ask for is on the device."""

    def __init__(self, buffers: DecodeBuffers, size: int) -> None:
        self._buffers, self._size = buffers, size

    def once(self, key: Hashable, make: Callable[[], V]) -> V:
        kind, group, *_ = cast(tuple[Any, ...], key)
        if kind == "device slots":
            return cast(V, self._buffers.slots(group, self._size))
        assert kind == "plan", key
        return cast(V, Plan(self._buffers.tables(group, self._size)))


class DecodeGraphs:
    """Sizes 1, 2, 4, … and `most` rows.

    Args:
        capture: makes a step replayable.
        compiled: capture what torch.compile makes of the model.
    """

    def __init__(
        self,
        packed: PackedModel,
        buffers: DecodeBuffers,
        groups: int,
        most: int,
        capture: Capture,
        *,
        compiled: bool = False,
    ) -> None:
        self._packed, self._buffers, self._capture = packed, buffers, capture
        self._groups, self._compiled = groups, compiled
        self._sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        """The ones that are captured."""
        return sorted(self._replays)

    @torch.inference_mode()
    def prepare(self, num_blocks: int) -> str | None:
        """Capture every size; or say why there are no graphs. Pools may hold nothing that matters.

        Args:
            num_blocks: of the smallest pool, no fewer than `most`.
        """
        size = None
        try:
            for condition in (self._kernel, self._host_reads):
                if reason := condition():
                    return reason
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                replay = self._capture(partial(self.run, size, compiled=self._compiled))
                if reason := self._check(replay, size, num_blocks):
                    return reason
                self._replays[size] = replay
        except Exception as error:  # whatever a device or a model does with a capture
            return f"{'a step' if size is None else f'{size} rows'} cannot be captured: {one_line(error)}"
        finally:
            if len(self._replays) < len(self._sizes):
                self._replays.clear()
        return None

    def run(self, size: int, *, compiled: bool = False) -> torch.Tensor:
        """The forward over the buffers: [size, vocab]."""
        step, ids, positions = _StaticStep(self._buffers, size), self._buffers.ids, self._buffers.positions
        return self._packed.forward(step, ids[:size], positions[:size], compiled=compiled)

    def takes(self, step: Step) -> bool:
        """Every row reaches the output head, as decode and verify rows do, and there are not too many.

        A captured step runs the model without adapters.
        """
        if step.adapter_rows():
            return False
        return bool(self._replays) and len(step.rows) == step.num_tokens <= self._sizes[-1]

    @torch.inference_mode()
    def logits(self, step: Step, ids: torch.Tensor) -> torch.Tensor:
        """[R, vocab] of a step that `takes` takes, for the ids [R]."""
        tables = [[step.block_table(s, g) for s in step.segments] for g in range(self._groups)]
        owners = np.repeat(np.arange(len(step.segments)), [s.num_rows for s in step.segments])
        self._buffers.load(step.positions, owners, tables, ids)
        size = self._sizes[bisect_left(self._sizes, step.num_tokens)]
        return self._replays[size]()[: step.num_tokens].clone()  # the next replay writes to the same place

    # What has to hold

    def _kernel(self) -> str | None:
        without = [s for s in self._packed.storages if not isinstance(s, TableStorage) or s.kernel is None]
        return "they need the paged kernel, which is off" if without else None

    def _host_reads(self) -> str | None:
        nobody = np.zeros(0, dtype=np.int64)
        self._buffers.load(nobody, nobody, [[] for _ in range(self._groups)], self._buffers.ids[:0])
        # in inference mode torch would show whole functions instead of the operations they are made of
        with torch.inference_mode(False), torch.no_grad(), HostReads() as reads:
            self.run(2 if len(self._sizes) > 1 else 1)
        return reads.found and f"the model's forward reads values on the host ({reads.found})"

    def _check(self, replay: Callable[[], torch.Tensor], size: int, num_blocks: int) -> str | None:
        """Another step than the captured one, replayed, has to give what it gives when it is run."""
        self._fill(size, num_blocks)
        want = self.run(size).clone()
        got = replay()
        largest = max(1.0, float(want[want.isfinite()].abs().max()))
        apart = float((got - want)[got != want].abs().float().max()) if not torch.equal(got, want) else 0.0
        if not apart <= TOLERANCE[want.dtype] * largest:  # also refuses NaN
            return f"a replay of {size} rows is off by {apart:.3g}, the largest logit being {largest:.3g}"
        return None

    def _fill(self, size: int, num_blocks: int) -> None:
        """Load rows with contexts of their own, over random K and V."""
        rng = np.random.default_rng(size)
        width = min(4, num_blocks // size, self._buffers.width)
        blocks = 1 + np.arange(size * width).reshape(size, width)
        storages = cast(Sequence[TableStorage], self._packed.storages)
        block_size = self._buffers.block_size
        for storage in storages:
            for pool in (storage.keys, storage.values):
                pool[block_size : (1 + int(blocks.max())) * block_size].normal_()
        positions = rng.integers(width * block_size, size=size)
        tables = [blocks.tolist() for _ in range(self._groups)]
        ids = torch.arange(size, device=self._buffers.ids.device)
        self._buffers.load(positions, np.arange(size), tables, ids)
