"""Guesses by a second, cheaper model of the same vocabulary, on a KV cache of its own.

Its cache of a request holds a beginning of the request's tokens, and behind it the drafts that were fed
to it last. Those of them that came true have become tokens of the request and stay; the rest is
truncated. What is missing is computed before the first draft: a token or two after each verify, more
when drafts were off for a while, all of the prompt at first. The latter go in chunks, a few tokens a
step, so that running streams keep going.

A draft is sampled as the target samples that position, with the same noise: where the two models agree
on a distribution, they agree on the token drawn from it. Whoever finds no room gets no drafts; nobody is
preempted for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ferrum_mlx.batch import ItemResult, RowSampling, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import Admitted, Deferred, KvSlotRequest, NotSubmitted
from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.request import Request
from ferrum_mlx.speculative.proposer import Proposer

KEEPING_UP = 2  # tokens that a round leaves missing: the last draft, and the target's own


@dataclass(slots=True, eq=False)
class Draft:
    """One request's cache in the draft model, and the guesses of this round.

    Attributes:
        known: tokens of the cache that are the request's own; behind them are those of `fed`.
    """

    request: Request
    cache_id: int
    known: int
    fed: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    wanted: int = 0

    @property
    def length(self) -> int:
        """Tokens of the request, the first guess being the next one."""
        return len(self.request.prompt) + len(self.request.output)

    @property
    def missing(self) -> int:
        return self.length - self.known

    def chunk(self, count: int) -> UnifiedItem:
        """The next `count` tokens that the cache lacks."""
        end = self.known + count
        return UnifiedItem(
            cache_id=self.cache_id,
            q_tokens=self.request.tokens(self.known, end),
            pos_offset=self.known,
            is_final_chunk=end == self.length,
            sampling=self._sampling(),
        )

    def decode(self) -> UnifiedItem:
        """The latest guess, for the one behind it."""
        return UnifiedItem(
            cache_id=self.cache_id,
            q_tokens=(self.guesses[-1],),
            pos_offset=self.known + len(self.fed),
            sampling=self._sampling(),
        )

    def _sampling(self) -> RowSampling:
        """As the target samples the position of the next guess."""
        request = self.request
        params = replace(request.params, logprobs=None, prompt_logprobs=None)
        known = params.looks_back
        return RowSampling(
            params=params,
            seed=request.seed,
            sample_index=request.sample_index,
            position=len(request.output) + len(self.guesses),
            prompt=request.prompt if known else (),
            output=(*request.output, *self.guesses) if known else (),
            end_ids=request.end_ids,
            bad_sequences=request.bad_sequences,
        )


class DraftModelProposer(Proposer):
    """Owns `executor`, whose vocabulary is the target's."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        capabilities = executor.capabilities()
        self._longest = capabilities.kv_capacity
        self._budget = executor.maximum_scheduled_tokens
        self._prefill_budget = min(capabilities.prefill_while_decoding, self._budget)
        self._drafts: dict[Request, Draft] = {}
        self._refused: dict[Request, int] = {}  # at which version of the capacity

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = [draft for request, count in wanted.items() if (draft := self._begin(request, count))]
        drafting = self._catch_up(drafts)
        while drafting := [draft for draft in drafting if len(draft.guesses) < draft.wanted]:
            results = self._run([draft.decode() for draft in drafting])
            for draft, result in zip(drafting, results, strict=False):
                draft.fed.append(draft.guesses[-1])
                draft.guesses += result.token_ids
            drafting = drafting if results else []
        return {draft.request: draft.guesses for draft in drafts}

    def trust(self, request: Request) -> int:
        """A model that someone has chosen for this."""
        return 2

    def forget(self, request: Request) -> None:
        self._refused.pop(request, None)
        draft = self._drafts.pop(request, None)
        if draft is not None:
            self._executor.release_cache(draft.cache_id)

    def close(self) -> None:
        self._drafts.clear()
        self._executor.shutdown()

    def _begin(self, request: Request, count: int) -> Draft | None:
        """The request's cache without what did not come true; None where it can have no draft now."""
        draft = self._drafts.get(request) or self._admit(request)
        if draft is None or not self._truncate(draft):
            return None
        draft.guesses = []
        draft.wanted = min(count, self._longest - draft.length + 1)  # the last guess itself is not fed
        return draft if draft.wanted > 0 else None

    def _admit(self, request: Request) -> Draft | None:
        version = self._executor.capacity.value
        if self._refused.get(request) == version:
            return None
        tokens = request.tokens(0, len(request.prompt) + len(request.output))
        admission = self._executor.try_admit_prefill(request.request_id, tokens)
        if not isinstance(admission, Admitted):
            self._refused[request] = version
            return None
        draft = self._drafts[request] = Draft(request, admission.cache_id, admission.num_cached_tokens)
        return draft

    def _truncate(self, draft: Draft) -> bool:
        """Keep what has come true, but never the last token, whose row gives the first guess."""
        if draft.known == draft.length:  # nothing was said since
            draft.known, draft.fed = draft.length - 1, []
        said = draft.request.tokens(draft.known, draft.length - 1)
        draft.known += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft.fed, said)))  # noqa: B905
        draft.fed = []
        try:
            self._executor.truncate_kv(draft.cache_id, draft.known)
        except ContractError:  # another request has found the block to be cut, or a window has left it
            self.forget(draft.request)
            return False
        return True

    def _catch_up(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Compute what the caches lack, as far as this step may; returns those with a first guess."""
        room, prefill = self._budget, self._prefill_budget
        counts: dict[Draft, int] = {}
        for draft in sorted(drafts, key=lambda draft: draft.missing):
            keeps_up = draft.missing <= KEEPING_UP
            count = min(draft.missing, room if keeps_up else min(room, prefill))
            if count and self._reserve(draft, draft.known + count):
                counts[draft] = count
                room -= count
                prefill -= 0 if keeps_up else count
        results = self._run([draft.chunk(count) for draft, count in counts.items()])
        for (draft, count), result in zip(counts.items(), results, strict=False):
            draft.known += count if result.num_tokens is None else result.num_tokens
            draft.guesses += result.token_ids
        return [draft for draft in counts if draft.guesses]

    def _reserve(self, draft: Draft, length: int) -> bool:
        """Room for the chunk, and if it is the last one for the guesses fed behind it."""
        target = length + draft.wanted - 1 if length == draft.length else length
        try:
            self._executor.reserve_kv_slots([KvSlotRequest(draft.cache_id, target)])
        except CapacityError:
            return False
        return True

    def _run(self, items: Sequence[UnifiedItem]) -> list[ItemResult]:
        """The results, or none where the executor defers; a request it blames has its cache dropped."""
        if not items:
            return []
        submission = self._executor.submit(UnifiedBatch(tuple(items)))
        if isinstance(submission, Deferred):
            return []
        if isinstance(submission, NotSubmitted):
            blamed = [r for r, draft in self._drafts.items() if draft.cache_id in submission.cache_ids]
            for request in blamed:
                self.forget(request)
            return []
        return submission.result()
