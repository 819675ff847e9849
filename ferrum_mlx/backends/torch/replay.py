"""Steps of few rows replayed: the model's Python is left out, its arithmetic stays.

On a CPU most of a small model's step is Python: modules, decorators and wrappers around a thousand small
operations. They do the same in every step of as many rows, so the first one is recorded. Some kinds of call
stay whole: attention and what adapters add to layers, which the running step answers, and Linear layers,
of which those with the same input become one; norms and rotary embeddings are compiled where they can be.
A forward that cannot be recorded runs as it is, and the reason is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ferrum_mlx import nearties
from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.adapters import AdaptedLayers
from ferrum_mlx.backends.torch.attention import Attending, RunningStep, attend_running
from ferrum_mlx.backends.torch.idioms import shortened
from ferrum_mlx.backends.torch.layers import row_by_row
from ferrum_mlx.backends.torch.products import linear
from ferrum_mlx.backends.torch.recording import (
    Call,
    CannotRecord,
    ChangesInPlace,
    Function,
    Name,
    Recorder,
    compiled,
    unrecorded,
)
from ferrum_mlx.backends.torch.weights import PackedLinear, has_packed
from ferrum_mlx.errors import one_line

MOST = 16  # rows; with more of them products take most of a step
TOLERANCE = 1e-4  # of the largest logit; float32
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids and positions [T] → logits [T, vocab]


class _Recorded(Attending):
    """Attention while a forward is recorded, or looked at: each row's answer follows from itself."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def attend(self, *call: Any) -> torch.Tensor:
        answer: torch.Tensor = unrecorded(row_by_row, *call[:3])
        if self._recorder is not None:
            self._recorder.note(attend_running, call, {}, answer, pure=False)
        return answer


class Replays:
    """Recorded forwards of a model, by their number of rows."""

    def __init__(self, model: nn.Module, forward: Forward, adapted: AdaptedLayers) -> None:
        self._model, self._forward, self._adapted = model, forward, adapted
        self._programs: dict[int, Function | None] = {}
        self.uncompiled = ""  # why norms and rotary embeddings are not, where they could be

    def prepare(self, most: int) -> str | None:
        """Record steps of one to `most` rows, so that none has to wait for it; or why nothing is replayed."""
        reason = self._record(1)
        for rows in range(2, 1 if reason else min(most, MOST) + 1):
            self._record(rows)
        return reason

    def takes(self, step: Step) -> bool:
        """Few rows, and all of them reach the output head; the first such step is recorded."""
        rows = step.num_tokens
        if rows > MOST or rows != len(step.rows) or self._programs.get(1) is None:
            return False
        if rows not in self._programs:
            self._record(rows)
        return self._programs[rows] is not None

    def logits(self, running: RunningStep, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, vocab] of a step that `takes` takes."""
        program = self._programs[len(ids)]
        assert program is not None
        with running.entered():
            logits: torch.Tensor = program(ids, positions)
        return logits

    def _record(self, rows: int) -> str | None:
        reason = None if self.uncompiled else self._tried(rows, compile_idioms=True)
        if self._programs.get(rows) is not None:
            return None
        plain = self._tried(rows, compile_idioms=False)
        if reason and not plain:
            self.uncompiled = reason
        return plain

    @torch.inference_mode()
    def _tried(self, rows: int, *, compile_idioms: bool) -> str | None:
        self._programs[rows] = None
        try:
            try:
                program = self._recorded(rows, once=True, compile_idioms=compile_idioms)
            except ChangesInPlace:
                program = self._recorded(rows, once=False)
            if reason := self._check(program, rows):
                return reason
        except CannotRecord as reason:
            return str(reason)
        except Exception as error:  # whatever an architecture does that a recorder does not expect
            return f"a step cannot be recorded: {one_line(error)}"
        self._programs[rows] = program
        return None

    def _recorded(self, rows: int, *, once: bool, compile_idioms: bool = False) -> Function:
        ids, positions = torch.arange(rows), torch.arange(rows)
        recorder = Recorder(ids, positions, once=once)
        self._adapted.recorder = recorder
        try:
            with _Recorded(recorder).entered(), _whole(self._model, recorder), recorder:
                logits = self._forward(ids, positions)
        finally:
            self._adapted.recorder = None
        calls, output = _merge(recorder) if once else recorder.calls, recorder.name_of(logits)
        if compile_idioms:
            calls = shortened(calls, output)
        return compiled(calls, recorder.given, recorder.constants, output)

    def _check(self, program: Function, rows: int) -> str | None:
        """Other ids at other positions have to give what the model gives."""
        ids, positions = torch.arange(rows) + 3, torch.arange(rows).flip(0) * 2 + 5
        with _Recorded(None).entered():
            want, got = self._forward(ids, positions), program(ids, positions)
        apart = float((got - want)[got != want].abs().max()) if not torch.equal(got, want) else 0.0
        tolerance = nearties.SAME_PRODUCTS if has_packed(self._model) else TOLERANCE
        if not apart <= tolerance * max(1.0, float(want[want.isfinite()].abs().max())):  # also refuses NaN
            return f"a replayed step of {rows} rows is off by {apart:.3g}"
        return None


def _merge(recorder: Recorder) -> list[Call]:
    """The calls, those of Linear layers with the same input as one."""
    siblings: dict[tuple[Name, type], list[tuple[Any, Call]]] = defaultdict(list)
    for call in recorder.calls:
        if isinstance(call.function, _Whole):
            module = call.function.module
            siblings[call.args[0], type(module)].append((module, call))
    merged: dict[Name, Call | None] = {}
    for (given, _), group in siblings.items():
        layers = [layer for layer, _ in group]
        if len(group) > 1 and (whole := _joined(layers)) is not None:
            results = tuple(call.results[0] for _, call in group)
            side = _Side(whole, [layer.out_features for layer in layers])
            merged |= {**dict.fromkeys(results), results[0]: Call(side, (given,), {}, results)}
    found = [merged.get(call.results[0], call) for call in recorder.calls]
    return [call for call in found if call is not None]


class _Whole:
    """A Linear layer as one call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module: Any = self.module
        if isinstance(module, PackedLinear):
            return type(module).forward(module, x)
        return linear(x, module.weight, module.bias)

    def record(self, recorder: Recorder, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = unrecorded(self, x)
        recorder.note(self, (x,), {}, out)
        return out


class _Side:
    """Layers side by side: one product, cut into theirs."""

    def __init__(self, whole: Function, sizes: list[int]) -> None:
        self._whole, self._sizes = whole, sizes

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous() for part in self._whole(x).split_with_sizes(self._sizes, -1)]


@contextmanager
def _whole(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Linear layers are recorded as one call each."""
    layers = [m for m in model.modules() if isinstance(m, PackedLinear) or type(m) is nn.Linear]
    for layer in layers:
        layer.__dict__["forward"] = partial(_Whole(layer).record, recorder)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _joined(layers: Sequence[Any]) -> Function | None:
    """One function for layers of the same input, over memory that they go on using; None if it cannot be."""
    if isinstance(layers[0], PackedLinear):
        return type(layers[0]).joined(layers)
    if len({layer.bias is None for layer in layers}) > 1:
        return None
    weight = _adjacent([layer.weight for layer in layers])
    if weight is None:
        weight = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
    return lambda x: linear(x, weight, bias)


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Matrices that lie one behind the other in memory, as one: they were joined for another model."""
    end = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        end += part.nbytes
    if parts[0].untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
        return None
    return parts[0].detach().as_strided((sum(map(len, parts)), parts[0].shape[1]), parts[0].stride())
