"""Modules that run one sequence at a time: found by tracing, fed with their own part of a step."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from ferrum_mlx.backends.mlx.attention import SeveralCaches, StepContext
from ferrum_mlx.backends.mlx.loop import Loops
from ferrum_mlx.backends.mlx.state import StateLayer, StateStore
from ferrum_mlx.backends.mlx.trace import CONSTANT, NO_ARRAY, OTHER, Trace, trace
from ferrum_mlx.backends.step import Step
from ferrum_mlx.batch import UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.kv.manager import KVManager

WIDTH = 2


class Sum(nn.Module):
    """A running sum over the tokens; notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, x: mx.array, by: mx.array, heads: mx.array, cache: Any) -> tuple[Any, ...]:
        self.seen.append(x.shape)
        before = 0 if cache[0] is None else cache[0]
        sums = mx.cumsum(x, axis=1) + before
        cache[0] = sums[:, -1:]
        return sums * by, heads, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()
        self.other = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        heads = x.reshape(*x.shape[:2], 1, WIDTH).transpose(0, 2, 1, 3)  # [1, heads, tokens, width]
        sums, heads, _ = self.sum(x, mx.array([2.0]), heads, cache)
        return sums + self.other(heads.transpose(0, 2, 1, 3).reshape(x.shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Layer(), Layer()]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        x = mx.broadcast_to(ids[..., None], (*ids.shape, WIDTH)).astype(mx.float32)
        for layer, c in zip(self.layers, cache, strict=True):
            x = layer(x, c)
        return x


def make_caches() -> list[ArraysCache]:
    return [ArraysCache(1), ArraysCache(1)]


@pytest.fixture
def model() -> Model:
    mx.set_default_device(mx.cpu)
    return Model()


@pytest.fixture
def traced(model: Model) -> Trace:
    return trace(model, make_caches(), make_caches())[0]


def test_the_innermost_module_with_a_cache_is_found_and_its_layout(model: Model, traced: Trace) -> None:
    found = traced.innermost({0, 1})
    assert set(found) == {id(layer.sum) for layer in model.layers}
    assert set(traced.innermost({1})) == {id(model.layers[1].sum)}
    module, layout = found[id(model.layers[0].sum)]
    assert module is model.layers[0].sum
    assert layout.given == ((1, CONSTANT, 2, NO_ARRAY), {})
    assert layout.result == (1, 2, NO_ARRAY)
    assert type(module) is Sum  # tracing leaves no trace


def test_the_module_that_is_handed_all_caches_is_found_too(model: Model, traced: Trace) -> None:
    ((module, layout),) = traced.of(model).values()
    assert module is model
    assert layout.given == ((1,), {"cache": [NO_ARRAY, NO_ARRAY]})
    assert layout.result == 1


def test_of_several_caches_in_one_object_the_object_counts() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sum()

        def __call__(self, x: mx.array, cache: Any) -> mx.array:
            heads = mx.ones((1, 1, x.shape[1] + 1, WIDTH))
            return self.inner(x, mx.array([1.0]), heads, cache[0])[0]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            return self.both(mx.zeros((*ids.shape, WIDTH)), cache[0])

    outer = Outer()
    fewer, more = ([CacheList(ArraysCache(1), KVCache())] for _ in range(2))
    traced, _ = trace(outer, fewer, more)
    assert set(traced.innermost({0})) == {id(outer.both)}
    (inner,) = (layout for call, layout in traced.calls if call.module is outer.both)
    assert inner.given == ((1, NO_ARRAY), {})
    assert OTHER < CONSTANT < 0


def test_a_model_whose_modules_depend_on_the_length_is_refused(model: Model) -> None:
    original = Model.__call__

    def call(self: Model, ids: mx.array, cache: list[Any]) -> mx.array:
        out = original(self, ids, cache)
        return self.layers[0](out, cache[0]) if ids.shape[1] > 4 else out

    model.__class__ = type("Odd", (Model,), {"__call__": call})
    with pytest.raises(UnsupportedModelError, match="other modules for other numbers of tokens"):
        trace(model, make_caches(), make_caches())


class Steps:
    """Steps of a model with looped sums over real states and a real manager."""

    def __init__(self, model: Model, traced: Trace) -> None:
        self.model, self.context = model, StepContext()
        self.states = StateStore([1, 1])
        self.kv = KVManager([], [], 4, 64, prefix_cache=False, num_states=8, copy_state=self.states.copy)
        self.loops = Loops(self.context, self.states)
        self.loops.install(traced.innermost({0, 1}))
        self.caches = [StateLayer(self.states, i) for i in range(2)]

    def run(self, *parts: tuple[int, list[int]]) -> dict[int, list[list[list[float]]]]:
        """(cache, ids) to what the model gives for them; all in one step."""
        items = [UnifiedItem(cache_id=c, q_tokens=tuple(t), pos_offset=self.kv.length(c)) for c, t in parts]
        self.kv.reserve([KvSlotRequest(i.cache_id, i.pos_offset + len(i.q_tokens)) for i in items])
        step = Step(UnifiedBatch(tuple(items)), self.kv)
        self.context.enter(step)
        rows = self.model(mx.array(step.token_ids)[:, None], self.caches)
        self.context.leave()
        mx.eval(rows, self.states.close())
        for item in items:
            self.kv.commit(item.cache_id, item.q_tokens)
        return {s.cache_id: rows[s.start : s.end, 0].tolist() for s in step.segments}


def test_each_sequence_gets_what_it_gets_alone(model: Model, traced: Trace) -> None:
    steps = Steps(model, traced)
    ids = {steps.kv.create(): tokens for tokens in ([1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14])}
    a, b, c, d = ids
    seen = model.layers[0].sum.seen
    parts = [
        [(a, 3), (b, 1)],  # a chunk, and a first token alone
        [(b, 1), (a, 1), (c, 2)],
        [(a, 1), (b, 1), (c, 1), (d, 1)],  # three decode rows with a state, one without
        [(a, 1), (d, 1)],
    ]
    shapes = []
    got: dict[int, list[Any]] = {cache: [] for cache in ids}
    for part in parts:
        seen.clear()
        for cache, rows in steps.run(
            *((cache, ids[cache][len(got[cache]) :][:count]) for cache, count in part)
        ).items():
            got[cache] += rows
        shapes.append(list(seen))
    one, three = (1, 1, WIDTH), (3, 1, WIDTH)
    assert shapes == [
        [one, (1, 3, WIDTH)],
        [(2, 1, WIDTH), (1, 2, WIDTH)],
        [one, three],
        [(2, 1, WIDTH)],
    ]
    for cache, tokens in ids.items():
        alone = model(mx.array([tokens]), make_caches())[0].tolist()
        assert len(got[cache]) == len(alone)
        for ours, theirs in zip(got[cache], alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_removed_loops_leave_the_model_as_it_was(model: Model, traced: Trace) -> None:
    steps = Steps(model, traced)
    assert type(model.layers[0].sum) is not Sum
    steps.loops.remove()
    assert [type(layer.sum) for layer in model.layers] == [Sum, Sum]


def test_an_array_that_cannot_be_split_is_refused(model: Model, traced: Trace) -> None:
    steps = Steps(model, traced)
    cache, layer = steps.kv.create(), model.layers[0]

    def call(self: Layer, x: mx.array, cache: Any) -> mx.array:
        return self.sum(x, mx.array([1.0]), mx.ones((3, WIDTH)), cache)[0]

    layer.__class__ = type("Odd", (Layer,), {"__call__": call})
    with pytest.raises(UnsupportedModelError, match="cannot be split by sequences"):
        steps.run((cache, [1, 2]))


def test_several_caches_are_one_object_for_a_sequence() -> None:
    states = StateStore([1, 2])
    both = SeveralCaches([StateLayer(states, 0), StateLayer(states, 1)])
    assert both.is_state
    assert isinstance(both[1], StateLayer)
