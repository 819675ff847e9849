"""What a launched step will give: tokens, logprobs and logits, on the device until they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.mlx.logprobs import RowLogprobs
from ferrum_mlx.backends.mlx.sampler import sample
from ferrum_mlx.backends.step import Step
from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedItem


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a launch, for the step behind it; `last` says where a cache's last one is among them."""

    tokens: mx.array
    last: dict[int, int]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Rows are in the step's order.

    Attributes:
        logits: [R, vocab], R the rows that reached the output head.
        tokens: one a sampled row.
        sampled: logprobs of those tokens, where they are wanted.
        known: logprobs of the items' targets.
        landed: told when the step is done.
    """

    step: Step
    logits: mx.array
    tokens: mx.array
    sampled: RowLogprobs
    known: RowLogprobs
    landed: Callable[[], None]

    @property
    def arrays(self) -> list[mx.array]:
        """What `result` reads back, but for full logits."""
        return [self.tokens, *self.sampled.arrays, *self.known.arrays]

    @property
    def for_the_next(self) -> Sampled:
        return Sampled(self.tokens, self.step.sampled_last)

    def result(self) -> list[ItemResult]:
        mx.eval(self.arrays)
        self.landed()
        tokens = iter(np.array(self.tokens).tolist())
        sampled, known = iter(self.sampled.read()), iter(self.known.read())
        results: list[ItemResult] = []
        start = 0
        for item in self.step.items:
            end = start + item.num_rows_out
            result = ItemResult(
                item.cache_id,
                tuple(islice(tokens, item.num_sampled)),
                self._full_logits(item, start, end),
                logprobs=tuple(islice(sampled, sum(map(_wants_logprobs, item.row_sampling)))),
                prompt_logprobs=tuple(islice(known, len(item.targets))),
            )
            results.append(result)
            start = end
        return self.step.in_batch_order(results)

    def _full_logits(self, item: UnifiedItem, start: int, end: int) -> np.ndarray | None:
        if item.logits is not LogitsPolicy.FULL or start == end:
            return None
        return np.array(self.logits[start:end].astype(mx.float32))


def token_ids(step: Step, before: Sampled | None) -> mx.array:
    """[T] int32: a step's ids, those not known yet taken from the step before, which nobody waits for."""
    ids = mx.array(step.token_ids)
    if step.awaited:
        assert before is not None
        sources = [before.last[cache] for cache in step.awaited.values()]
        ids[_indices(list(step.awaited))] = before.tokens[_indices(sources)].astype(mx.int32)
    return ids


def choose(step: Step, logits: mx.array, landed: Callable[[], None]) -> PendingStep:
    """Sample those of the head's rows, [R, vocab], that are to be sampled; nothing is evaluated yet."""
    rows: list[int] = []
    targets: list[tuple[int, int, int]] = []  # row of the head, id, how many of the likeliest besides
    end = 0
    for item in step.items:
        count = item.sampling.params.prompt_logprobs or 0
        targets += [(end + i, target, count) for i, target in enumerate(item.targets)]
        end += item.num_rows_out
        rows += range(end - item.num_sampled, end)
    sampling = [row for item in step.items for row in item.row_sampling]
    chosen = logits if len(rows) == len(logits) else logits[_indices(rows)]
    tokens = sample(chosen, sampling) if rows else mx.zeros((0,), mx.uint32)
    wanted = [i for i, row in enumerate(sampling) if _wants_logprobs(row)]
    counts = [sampling[i].params.logprobs or 0 for i in wanted]
    return PendingStep(
        step,
        logits,
        tokens,
        RowLogprobs(chosen, wanted, tokens[_indices(wanted)], counts),
        RowLogprobs(
            logits,
            [row for row, _, _ in targets],
            _indices([target for _, target, _ in targets]),
            [count for _, _, count in targets],
        ),
        landed,
    )


def _wants_logprobs(row: RowSampling) -> bool:
    return row.params.logprobs is not None


def _indices(values: list[int]) -> mx.array:
    return mx.array(values, dtype=mx.int32)
