"""A step on its way: the items it is made of, its results, and what it has brought."""

from __future__ import annotations

from dataclasses import dataclass

from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedItem
from ferrum_mlx.executor import Pending
from ferrum_mlx.request import Request
from ferrum_mlx.scheduler import Scheduled


@dataclass(slots=True)
class Work:
    """What one call of Engine.step has done so far; see metrics.StepStats."""

    started: float
    schedule_s: float = 0.0
    forward_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    landed: int = 0

    def count(self, scheduled: Scheduled, computed: int, output: int) -> None:
        if scheduled.decodes:
            self.decode_tokens += output
        else:
            self.prefill_tokens += computed


class Launched:
    """A submitted step. Its requests count what it computes as computed from now on.

    Attributes:
        started: when it was submitted.
    """

    def __init__(
        self, plan: list[Scheduled], items: list[UnifiedItem], pending: Pending, started: float
    ) -> None:
        self.plan, self.items, self.started = plan, items, started
        self._pending = pending
        for scheduled, item in zip(plan, items, strict=True):
            scheduled.request.advance(scheduled.num_tokens)
            scheduled.request.in_flight += item.num_sampled > 0

    @property
    def num_rows(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.plan)

    @property
    def num_drafts(self) -> int:
        return sum(scheduled.num_tokens - 1 for scheduled in self.plan if scheduled.decodes)

    def result(self) -> list[ItemResult]:
        """Waits for the device."""
        return self._pending.result()

    def settle(self, request: Request, item: UnifiedItem, result: ItemResult) -> int:
        """Count an item's result instead of the promise; returns how many tokens were computed."""
        request.in_flight -= item.num_sampled > 0
        computed = len(item.q_tokens) if result.num_tokens is None else result.num_tokens
        request.advance(computed - len(item.q_tokens))
        return computed


def item_of(scheduled: Scheduled) -> UnifiedItem:
    """A request's share of a step, in the executor's terms."""
    request, params = scheduled.request, scheduled.request.params
    assert request.cache_id is not None
    drafts = tuple(request.drafts) if scheduled.decodes else ()
    start = request.num_computed_tokens
    end = start + scheduled.num_tokens - len(drafts)
    targets = request.prompt[start + 1 : end + 1] if params.prompt_logprobs is not None else ()
    history = (request.prompt, request.output) if params.looks_back else ((), ())
    return UnifiedItem(
        cache_id=request.cache_id,
        q_tokens=request.tokens(start, end) + drafts,
        pos_offset=start,
        is_final_chunk=end == request.num_tokens,
        verify=bool(drafts),
        sampling=RowSampling(
            params=params,
            seed=request.seed,
            sample_index=request.sample_index,
            position=len(request.output) + request.in_flight,
            prompt=history[0],
            output=history[1],
            end_ids=request.end_ids,
            bad_sequences=request.bad_sequences,
        ),
        logits=LogitsPolicy.PROMPT_LOGPROBS if targets else LogitsPolicy.SAMPLED,
        targets=tuple(targets),
    )
