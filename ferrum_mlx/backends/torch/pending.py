"""What a launched step will give: tokens, logprobs and logits, on the device until they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.device import Download, indices, upload
from ferrum_mlx.backends.torch.logprobs import RowLogprobs
from ferrum_mlx.backends.torch.sampler import sample
from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedItem


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a launch, for the step behind it; `last` says where a cache's last one is among them."""

    tokens: torch.Tensor
    last: dict[int, int]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Rows are in the step's order.

    Attributes:
        logits: [R, vocab], R the rows that reached the output head.
        tokens: one a sampled row; `read_tokens`, the same on their way to the host.
        sampled: logprobs of those tokens, where they are wanted.
        known: logprobs of the items' targets.
    """

    step: Step
    logits: torch.Tensor
    tokens: torch.Tensor
    read_tokens: Download
    sampled: RowLogprobs
    known: RowLogprobs

    @property
    def for_the_next(self) -> Sampled:
        return Sampled(self.tokens, self.step.sampled_last)

    def result(self) -> list[ItemResult]:
        tokens = iter(self.read_tokens.read())
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
        logits: np.ndarray = self.logits[start:end].float().cpu().numpy()
        return logits


@torch.inference_mode()
def token_ids(step: Step, before: Sampled | None, device: torch.device) -> torch.Tensor:
    """[T] int64: a step's ids, those not known yet taken from the step before, which nobody waits for."""
    ids = upload(step.token_ids, device, torch.int64)
    if step.awaited:
        assert before is not None
        sources = [before.last[cache] for cache in step.awaited.values()]
        ids[indices(list(step.awaited), device)] = before.tokens[indices(sources, device)]
    return ids


@torch.inference_mode()
def choose(step: Step, logits: torch.Tensor) -> PendingStep:
    """Sample those of the head's rows, [R, vocab], that are to be sampled; nothing is read back yet."""
    rows: list[int] = []
    targets: list[tuple[int, int, int]] = []  # row of the head, id, how many of the likeliest besides
    end = 0
    for item in step.items:
        count = item.sampling.params.prompt_logprobs or 0
        targets += [(end + i, target, count) for i, target in enumerate(item.targets)]
        end += item.num_rows_out
        rows += range(end - item.num_sampled, end)
    sampling = [row for item in step.items for row in item.row_sampling]
    device = logits.device
    chosen = logits if len(rows) == len(logits) else logits[indices(rows, device)]
    tokens = sample(chosen, sampling) if rows else logits.new_zeros(0, dtype=torch.int64)
    wanted = [i for i, row in enumerate(sampling) if _wants_logprobs(row)]
    counts = [sampling[i].params.logprobs or 0 for i in wanted]
    return PendingStep(
        step,
        logits,
        tokens,
        Download(tokens),
        RowLogprobs(chosen, wanted, tokens[indices(wanted, device)], counts),
        RowLogprobs(
            logits,
            [row for row, _, _ in targets],
            indices([target for _, target, _ in targets], device),
            [count for _, _, count in targets],
        ),
    )


def _wants_logprobs(row: RowSampling) -> bool:
    return row.params.logprobs is not None
