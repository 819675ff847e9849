"""A submitted step until its result is taken, and what must hold of the step after it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ferrum_mlx.batch import IN_FLIGHT, ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.errors import ContractError
from ferrum_mlx.executor import Pending


@dataclass(slots=True, eq=False)
class Flight:
    """Its result can be taken once.

    Attributes:
        start: when it was submitted.
        take: how its executor takes the result in.
        items: by cache.
        known: what IN_FLIGHT turned out to be, by cache, once the step before has said it.
    """

    batch: UnifiedBatch
    pending: Pending
    start: float
    take: Callable[[Flight], list[ItemResult]]
    items: dict[int, UnifiedItem] = field(init=False)
    known: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.items = {item.cache_id: item for item in self.batch.items}

    def result(self) -> list[ItemResult]:
        return self.take(self)

    def tokens(self, item: UnifiedItem) -> tuple[int, ...]:
        """An item's q_tokens as they were computed."""
        return (self.known[item.cache_id],) if item.q_tokens == (IN_FLIGHT,) else item.q_tokens

    def learn(self, result: ItemResult) -> None:
        """Take in what the step before has sampled."""
        if result.cache_id not in self.items:
            return
        if result.num_tokens is not None:
            raise ContractError(f"a part of cache {result.cache_id} was computed, and the next step is ahead")
        if result.token_ids:
            self.known[result.cache_id] = result.token_ids[-1]

    def next_offset(self, item: UnifiedItem) -> int | None:
        """Where `item` of the step ahead has to start; None if its cache has no part in this step.

        Raises:
            ContractError: it cannot be submitted before this step's result is known.
        """
        before = self.items.get(item.cache_id)
        samples = before is not None and before.num_sampled == 1 and not before.verify
        if item.q_tokens == (IN_FLIGHT,) and not samples:
            raise ContractError(f"cache {item.cache_id} has no token in flight")
        if before is None:
            return None
        if before.verify or item.sampling.params.looks_back:
            raise ContractError(
                f"cache {item.cache_id} goes on before its tokens are known",
                "allowed: no drafts in flight, and no penalties or bad words",
            )
        return before.pos_offset + len(before.q_tokens)


def check_results(batch: UnifiedBatch, results: list[ItemResult]) -> None:
    """One result an item, in order, that samples what was asked for, or computes a part of a chunk.

    Raises:
        ContractError: the backend broke that.
    """
    if [item.cache_id for item in batch.items] != [result.cache_id for result in results]:
        raise ContractError("the backend's results are not those of the batch, one an item, in its order")
    for item, result in zip(batch.items, results, strict=True):
        computed = len(item.q_tokens) if result.num_tokens is None else result.num_tokens
        partial = 0 < computed < len(item.q_tokens) and not item.verify
        wanted = 0 if partial else item.num_sampled
        if not partial and len(result.prompt_logprobs) != len(item.targets):
            raise ContractError(f"the backend has other logprobs of cache {item.cache_id} than its targets'")
        if len(result.token_ids) != wanted or not (partial or computed == len(item.q_tokens)):
            raise ContractError(
                f"the backend computed {computed} tokens of cache {item.cache_id} and sampled "
                f"{len(result.token_ids)}",
                f"allowed: {len(item.q_tokens)} and {item.num_sampled}",
            )
