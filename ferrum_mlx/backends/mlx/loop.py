"""Modules that run the sequences of a step one at a time, as mlx-lm runs them alone.

For what cannot live with rows of many sequences: modules with a state from token to token, and those
that compute with keys and values themselves. Such a module gets a subclass of its own class. Within a
step it is called once a sequence, with that sequence's tokens as [1, length, …], its own cache and mask
and its position as a number; what it returns goes back into rows. Decode rows of modules that only keep
a state are one call, as in mlx-lm's own batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ferrum_mlx.backends.mlx.attention import PagedLayer, PagedMask, SeveralCaches, StepContext
from ferrum_mlx.backends.mlx.state import StateLayer, StateStore
from ferrum_mlx.backends.mlx.trace import CONSTANT, Layout
from ferrum_mlx.backends.step import Segment, Step
from ferrum_mlx.errors import UnsupportedModelError

_CACHES = (PagedLayer, StateLayer, SeveralCaches)


class Loops:
    """The looped modules of one model."""

    def __init__(self, context: StepContext, states: StateStore) -> None:
        self._context, self._states = context, states
        self._modules: list[nn.Module] = []

    def __len__(self) -> int:
        return len(self._modules)

    def install(self, modules: dict[int, tuple[nn.Module, Layout]]) -> None:
        for module, layout in modules.values():
            original = type(module)
            looped = type(original.__name__, (original,), {"__call__": self._call(original, layout)})
            module.__class__ = looped
            self._modules.append(module)

    def remove(self) -> None:
        """Give the modules their own classes back."""
        for module in self._modules:
            module.__class__ = type(module).__bases__[0]
        self._modules.clear()

    def _call(self, original: type[nn.Module], layout: Layout) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            step = self._context.step
            if step is None:
                return original.__call__(module, *args, **kwargs)
            results: list[Any] = []
            for segments in self._units(step, [*args, *kwargs.values()]):
                own_args, own_kwargs = self._take(step, segments, layout.given, (args, kwargs), results[-1:])
                with self._context.within(segments):
                    result = original.__call__(module, *own_args, **own_kwargs)
                rows = segments[-1].end - segments[0].start
                results.append(tree_map(partial(_to_rows, rows), layout.result, result))
            return results[0] if len(results) == 1 else tree_map(_join, layout.result, *results)

        return call

    def _units(self, step: Step, values: list[Any]) -> list[list[Segment]]:
        """The segments of each call: one, or decode rows whose states can be one batch."""
        caches = [value for value in values if isinstance(value, _CACHES)]
        if caches and all(cache.is_state for cache in caches):
            return step.once("units of states", lambda: self._state_units(step))
        return [[segment] for segment in step.segments]

    def _state_units(self, step: Step) -> list[list[Segment]]:
        decodes = step.segments[: step.num_decodes]
        units: list[list[Segment]] = []
        for shapes, equal in groupby(decodes, key=lambda s: self._states.shapes(step.state_slot(s))):
            rows = list(equal)
            initial = all(shape is None for shape in shapes)
            units += [[segment] for segment in rows] if initial else [rows]
        return units + [[segment] for segment in step.segments[step.num_decodes :]]

    def _take(self, step: Step, segments: Sequence[Segment], axes: Any, given: Any, before: Any) -> Any:
        """What one call gets of arguments that stand for the whole step.

        It depends on the result of the call before it, whose reads of a pool are then over when it writes
        to that pool: else MLX would have to copy the pool.
        """
        done = [leaf[1] for leaf in tree_flatten(before) if isinstance(leaf[1], mx.array)]

        def take(axis: int, value: Any) -> Any:
            if isinstance(value, _CACHES):
                return value.alone(step, segments)
            if isinstance(value, PagedMask):
                return value.alone(step, segments[0])
            if not isinstance(value, mx.array) or axis == CONSTANT:
                return value
            rows = slice(segments[0].start, segments[-1].end)
            if value is self._context.positions:
                return segments[0].pos_offset if len(segments) == 1 else value[rows]
            if axis < 0 or value.shape[0] != step.num_tokens or value.shape[axis] != 1:
                raise _unsplittable(value)
            part = mx.depends(value[rows], done) if done else value[rows]
            return part.swapaxes(0, axis) if len(segments) == 1 else part

        return tree_map(take, axes, given)


def _to_rows(rows: int, axis: int, value: Any) -> Any:
    """A result of one call, the tokens on its first axis; those of decode rows are there already."""
    if not isinstance(value, mx.array) or axis == CONSTANT:
        return value
    if axis >= 0 and value.shape[axis] == rows and value.shape[0] == 1:
        return value.swapaxes(0, axis)
    if axis >= 0 and value.shape[axis] == 1 and value.shape[0] == rows:
        return value
    raise _unsplittable(value)


def _join(axis: int, *values: Any) -> Any:
    return mx.concatenate(list(values), axis=0) if axis >= 0 else values[0]


def _unsplittable(value: mx.array) -> UnsupportedModelError:
    return UnsupportedModelError(f"an array of shape {value.shape} cannot be split by sequences")
