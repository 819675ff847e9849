"""Which module of a model is handed which cache, and which axis of what it is handed runs over tokens.

Found out by running the model itself on two prompts of different length, unevaluated: so nothing has to
be known about an architecture, and nothing is guessed from a shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ferrum_mlx.errors import UnsupportedModelError

FEWER, MORE = 3, 5  # tokens
CONSTANT = -1  # an array without an axis of tokens
OTHER = -2  # an array whose shape follows the number of tokens in some other way
NO_ARRAY = -3


@dataclass(slots=True, eq=False)
class Call:
    module: nn.Module
    direct: frozenset[int]  # entries it is handed themselves
    given: Any  # (args, kwargs)
    within: set[int] = field(default_factory=set)  # entries handed to a module that it calls
    width: int = 0  # of the result's last axis
    result: Any = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Trees like (args, kwargs) and the result; leaves are the axis of tokens or one of the above."""

    given: Any
    result: Any


@dataclass(frozen=True, slots=True)
class Trace:
    calls: tuple[tuple[Call, Layout], ...]

    def innermost(self, entries: set[int]) -> dict[int, tuple[nn.Module, Layout]]:
        """By id, the modules that are handed one of the entries and hand it to nobody else."""
        return {
            id(call.module): (call.module, layout)
            for call, layout in self.calls
            if any(entry not in call.within for entry in call.direct & entries)
        }

    def backbone(self, vocab_size: int) -> nn.Module | None:
        """The outermost module that is handed all caches and gives hidden states rather than logits."""
        for call, layout in self.calls:
            if not call.direct and layout.result == 1 and call.width != vocab_size:
                return call.module
        return None

    def of(self, module: nn.Module) -> dict[int, tuple[nn.Module, Layout]]:
        return {id(module): (module, layout) for call, layout in self.calls if call.module is module}


def trace(model: nn.Module, fewer: list[Any], more: list[Any]) -> tuple[Trace, mx.array]:
    """Run the model on two lists of fresh caches, FEWER and MORE tokens long; the latter's logits.

    Raises:
        UnsupportedModelError: the model cannot even run alone.
    """
    first, _ = _run(model, FEWER, fewer)
    second, logits = _run(model, MORE, more)
    if [call.module for call in first] != [call.module for call in second]:
        raise UnsupportedModelError("the model runs other modules for other numbers of tokens")
    calls = []
    for a, b in zip(first, second, strict=True):
        layout = Layout(tree_map(_axis, a.given, b.given), tree_map(_axis, a.result, b.result))
        a.width = a.result.shape[-1] if layout.result == 1 else 0
        a.given = a.result = None
        calls.append((a, layout))
    return Trace(tuple(calls)), logits


def _run(model: nn.Module, tokens: int, caches: list[Any]) -> tuple[list[Call], mx.array]:
    known = {id(cache): index for index, cache in enumerate(caches)}
    calls: list[Call] = []
    with _recorded(model, known, calls):
        logits: mx.array = model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    return calls, logits


@contextmanager
def _recorded(model: nn.Module, known: dict[int, int], calls: list[Call]) -> Iterator[None]:
    """Every module gets a subclass of its own class that notes the calls with a known cache."""
    running: list[Call] = []

    def record(original: type[nn.Module]) -> type[nn.Module]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            direct = frozenset(known[id(v)] for v in values if id(v) in known)
            if not direct and not any(_holds(v, known) for v in values):
                return original.__call__(module, *args, **kwargs)
            for outer in running:
                outer.within |= direct
            made = Call(module, direct, (args, kwargs))
            calls.append(made)
            running.append(made)
            try:
                made.result = original.__call__(module, *args, **kwargs)
            finally:
                running.pop()
            return made.result

        return type(original.__name__, (original,), {"__call__": call})

    modules = {id(module): module for module in model.modules() if callable(module)}
    own = {key: type(module) for key, module in modules.items()}
    recording = {cls: record(cls) for cls in set(own.values())}
    try:
        for key, module in modules.items():
            module.__class__ = recording[own[key]]
        yield
    finally:
        for key, module in modules.items():
            module.__class__ = own[key]


def _holds(value: Any, known: dict[int, int]) -> bool:
    return isinstance(value, (list, tuple)) and any(id(part) in known for part in value)


def _axis(a: Any, b: Any) -> int:
    if not (isinstance(a, mx.array) and isinstance(b, mx.array)):
        return NO_ARRAY
    if a.shape == b.shape:
        return CONSTANT
    pairs = list(enumerate(zip(a.shape, b.shape, strict=False)))
    tokens = [axis for axis, pair in pairs if pair == (FEWER, MORE)]
    others = [axis for axis, pair in pairs if pair[0] != pair[1]]
    return tokens[0] if a.ndim == b.ndim and len(others) == 1 and tokens == others else OTHER
