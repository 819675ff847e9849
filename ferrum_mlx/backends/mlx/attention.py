"""Paged attention under mlx-lm's untouched model classes.

Every scheduled token is a batch row of length 1, the shape the models already take in a batched
decode. Each layer's cache object is a `PagedLayer`: it gives RoPE the rows' positions, writes K and V
into the pool's slots and returns itself as an opaque handle; mlx-lm's `scaled_dot_product_attention`,
replaced once by a dispatcher, hands such handles to the layer's `attend` and everything else to the
original. Nothing here knows an architecture. Modules that cannot live with a handle get their
sequences one at a time instead: see loop.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm.models.base as mlx_lm_base
from mlx_lm.models.cache import CacheList

from ferrum_mlx.backends.mlx.alone import SequenceKV, check_window
from ferrum_mlx.backends.mlx.pools import PagedStorage
from ferrum_mlx.backends.step import Segment, Step, window_of
from ferrum_mlx.errors import UnsupportedModelError

_original_attention = mlx_lm_base.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """LoRA adapters by number, each with those of `count` rows that go through it, int32; None: all.

    A `count` of None stands for however many there are.
    """

    groups: tuple[tuple[int, mx.array | None], ...] = ()
    count: int | None = None


NO_ADAPTERS = AdapterRows()


@dataclass(slots=True)
class StepContext:
    """Shared by the layers of one executor; empty between steps.

    Attributes:
        second_half: the pool that the second half of a step writes first (halves.py).
        middle: the keys that go there, computed behind all reads of the pools before; None if they are
            not those of the whole step.
    """

    step: Step | None = None
    positions: mx.array | None = None  # [T] int32
    second_half: PagedStorage | None = None
    middle: mx.array | None = None
    alone: dict[tuple[PagedLayer, Segment], SequenceKV] = field(default_factory=dict)
    adapter_rows: AdapterRows = NO_ADAPTERS  # of the rows that layers see now

    def enter(self, step: Step) -> None:
        self.step, self.positions = step, mx.array(step.positions)
        self.adapter_rows = _adapter_rows(step, 0, step.num_tokens)

    @contextmanager
    def within(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Layers see consecutive segments alone."""
        whole = self.adapter_rows
        if self.step is not None and whole.groups:
            self.adapter_rows = _adapter_rows(self.step, segments[0].start, segments[-1].end)
        yield
        self.adapter_rows = whole

    @contextmanager
    def through(self, adapter: int) -> Iterator[None]:
        """Outside of steps, all rows go through an adapter; 0 is none."""
        self.adapter_rows = AdapterRows(((adapter, None),)) if adapter else NO_ADAPTERS
        try:
            yield
        finally:
            self.adapter_rows = NO_ADAPTERS

    def leave(self) -> None:
        """A cache that outlived its step would hold a view of the pool, and the next write be a copy."""
        self.step = self.positions = self.middle = None
        self.adapter_rows = NO_ADAPTERS
        self.alone.clear()


def _adapter_rows(step: Step, start: int, end: int) -> AdapterRows:
    def make() -> AdapterRows:
        found = step.adapter_rows(start, end)
        groups = tuple((number, None if rows is None else mx.array(rows)) for number, rows in found)
        return AdapterRows(groups, end - start)

    return step.once(("adapters", start, end), make)


class StepCache(Protocol):
    """A cache object that stands for all of a step's sequences."""

    @property
    def is_state(self) -> bool:
        """It holds no keys and values, so decode rows can share a call."""
        ...

    def alone(self, step: Step, segments: Sequence[Segment]) -> Any:
        """The same for one sequence, or for decode rows as a batch, as mlx-lm's own cache."""
        ...


@dataclass(frozen=True, slots=True)
class PagedMask:
    """What `make_mask` returns; the real masks depend on the segment."""

    owner: PagedLayer
    return_array: bool
    window_size: int | None

    @property
    def window(self) -> int | None:
        return window_of(self.window_size, self.owner.window)

    def alone(self, step: Step, segment: Segment) -> mx.array | str | None:
        cache = self.owner.alone(step, [segment])
        return cache.make_mask(segment.num_rows, self.return_array, self.window_size)


class PagedLayer:
    """The cache object of one layer, in the shape mlx-lm's models expect of a cache."""

    is_state = False

    def __init__(self, context: StepContext, storage: PagedStorage, window: int | None) -> None:
        self._context, self.storage, self.window = context, storage, window

    @property
    def offset(self) -> mx.array:
        assert self._context.positions is not None
        return self._context.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedLayer, PagedLayer]:
        assert self._context.step is not None
        if self.storage is self._context.second_half:
            self._context.middle = keys
        self.storage.write(self._context.step, keys, values)
        return self, self

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> PagedMask:
        check_window(window_size, self.window)
        return PagedMask(self, return_array, window_size or None)

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        if mask is not None and not isinstance(mask, PagedMask):
            raise UnsupportedModelError(
                "the model builds its own attention mask, which paged attention cannot read"
            )
        assert self._context.step is not None
        window = window_of(self.window, mask.window if mask else None)
        return self.storage.attend(self._context.step, queries, window, scale, sinks)

    def alone(self, step: Step, segments: Sequence[Segment]) -> SequenceKV:
        (segment,) = segments
        known = self._context.alone
        if (self, segment) not in known:
            known[self, segment] = SequenceKV(self.storage, step, segment, self.window)
        return known[self, segment]

    @property
    def dtype(self) -> mx.Dtype:
        return self.storage.dtype

    def astype(self, dtype: mx.Dtype) -> PagedLayer:
        """Some models widen keys before attention; the pool can only agree."""
        if dtype != self.dtype:
            raise UnsupportedModelError(f"the model wants its {self.dtype} keys and values as {dtype}")
        return self

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return False


class SeveralCaches:
    """The cache object of a layer that keeps several caches."""

    def __init__(self, parts: Sequence[StepCache]) -> None:
        self._parts = parts

    def __getitem__(self, index: int) -> StepCache:
        return self._parts[index]

    @property
    def is_state(self) -> bool:
        return all(part.is_state for part in self._parts)

    def alone(self, step: Step, segments: Sequence[Segment]) -> CacheList:
        return CacheList(*(part.alone(step, segments) for part in self._parts))


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, PagedLayer):
        return keys.attend(queries, scale, mask, sinks)
    return _original_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install() -> None:
    """Replace mlx-lm's attention by the dispatcher, also where a model module holds it by name."""
    mlx_lm_base.scaled_dot_product_attention = _dispatch
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("mlx_lm.models.")
            and vars(module).get("scaled_dot_product_attention") is _original_attention
        ):
            vars(module)["scaled_dot_product_attention"] = _dispatch
