"""One mlx-lm model under packed steps: its cache objects, its looped modules, its output rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ferrum_mlx.backends.mlx.attention import PagedLayer, SeveralCaches, StepCache, StepContext
from ferrum_mlx.backends.mlx.layers import Entry, Inspection, LayerKV
from ferrum_mlx.backends.mlx.loop import Loops
from ferrum_mlx.backends.mlx.pools import PagedStorage
from ferrum_mlx.backends.mlx.rows import NoRows, RowSelector
from ferrum_mlx.backends.mlx.state import StateLayer, StateStore
from ferrum_mlx.backends.mlx.trace import Layout
from ferrum_mlx.backends.step import Step

Modules = dict[int, tuple[nn.Module, Layout]]


@dataclass(frozen=True, slots=True)
class Route:
    """Which modules run their sequences one at a time; `why` is None where none do."""

    modules: Modules
    why: str | None


class PackedModel:
    """`make_storage` gets the number of a layer's keys and values, and what they are."""

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        inspection: Inspection,
        states: StateStore,
        make_storage: Callable[[int, LayerKV], PagedStorage],
    ) -> None:
        self._model, self._states, self._vocab_size = model, states, inspection.vocab_size
        self.context = context
        self.storages: list[PagedStorage] = []
        self._num_states = 0
        self._caches = [self._cache(entry, make_storage) for entry in inspection.entries]
        self._middle = len(self.storages) // 2
        if self._middle:
            self.context.second_half = self.storages[self._middle]
        self._loops = Loops(self.context, states)
        self._backbone = inspection.trace.backbone(inspection.vocab_size)
        self._selector = RowSelector(self._backbone)
        self.routes = list(_routes(model, inspection))
        self.off: list[str] = []

    def _cache(self, entry: Entry, make_storage: Callable[[int, LayerKV], PagedStorage]) -> StepCache:
        parts: list[StepCache] = []
        for part in entry.parts:
            if isinstance(part, LayerKV):
                self.storages.append(make_storage(len(self.storages), part))
                parts.append(PagedLayer(self.context, self.storages[-1], part.window))
            else:
                parts.append(StateLayer(self._states, self._num_states))
                self._num_states += 1
        return SeveralCaches(parts) if entry.several else parts[0]

    def take(self, route: Route) -> None:
        """Row selection goes on last: a looped backbone gives the rows of the whole step."""
        self._selector.remove()
        self._loops.remove()
        self._loops.install(route.modules)
        self._selector = RowSelector(self._backbone)
        self.off = [route.why] if route.why else []
        if self._backbone is None:
            self.off.append("row selection before the output head: no part of the model computes all but it")

    def forward(self, step: Step, ids: mx.array) -> tuple[mx.array, mx.array | None]:
        """Logits [R, vocab] for the ids [T], and where the step can be cut in two; nothing is evaluated.

        When R is 0 the output head is not run.
        """
        self.context.enter(step)
        if len(step.rows) < step.num_tokens:
            self._selector.rows = mx.array(step.rows)
        try:
            logits: mx.array = self._model(ids[:, None], cache=self._caches)[:, 0]
        except NoRows:
            logits = mx.zeros((0, self._vocab_size))
        middle = self.context.middle
        self._leave()
        if len(logits) != len(step.rows):
            logits = logits[mx.array(step.rows)]
        return logits, middle

    def changed(self) -> tuple[list[mx.array], list[mx.array]]:
        """What the latest forward writes, to be evaluated with its result: up to its middle, and after."""
        first = [array for storage in self.storages[: self._middle] for array in storage.arrays()]
        rest = [array for storage in self.storages[self._middle :] for array in storage.arrays()]
        return first, rest + self._states.close()

    def recover(self) -> None:
        """Be usable again after a forward that failed; what was held is lost."""
        self._leave()
        self._states.reset()
        for storage in self.storages:
            storage.reset()

    def release(self) -> None:
        """Drop the weights and the pools."""
        self._selector.remove()
        self._loops.remove()
        self._model, self._backbone = nn.Module(), None
        self.routes.clear()
        self._caches.clear()
        self.storages.clear()
        self._states.reset()

    def _leave(self) -> None:
        self.context.leave()
        self._selector.rows = None


def _routes(model: nn.Module, inspection: Inspection) -> Iterator[Route]:
    """From the fastest on. Which one a model can take is found out by trying, not by its name.

    A looped module gets one sequence at a time (loop.py).
    """
    total = len(inspection.entries)
    unpaged = {i for i, entry in enumerate(inspection.entries) if not entry.paged}
    off = "many sequences in one call"
    if unpaged:
        why = f"{off}: {len(unpaged)} of {total} layers keep a state or several caches"
        yield Route(inspection.trace.innermost(unpaged), why)
    else:
        yield Route({}, None)
    if len(unpaged) < total:
        why = f"{off}: all {total} layers keep a state or compute with keys and values themselves"
        yield Route(inspection.trace.innermost(set(range(total))), why)
    whole = inspection.trace.of(inspection.trace.backbone(inspection.vocab_size) or model)
    yield Route(whole, f"{off}: the model as a whole runs one at a time")
