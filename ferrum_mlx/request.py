"""A request as the scheduler sees it: known tokens, and how many of them have their KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ferrum_mlx.batch import IN_FLIGHT
from ferrum_mlx.sampling import SamplingParams


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Every request wants num_computed_tokens to catch up with its known tokens; there are no phases.

    Attributes:
        max_tokens: params.max_tokens, or what the context leaves.
        priority: a lower one goes first.
        sample_index: tells the samples of one prompt apart, in their noise alone.
        adapter: the LoRA adapter it goes through; "" is none.
        end_ids, bad_sequences: what params.min_tokens and params.bad_words mean in ids.
        num_computed_tokens: whose KV is there, or is being computed by a step in flight.
        in_flight: output tokens that steps in flight are about to sample.
        drafts: guesses of the next output tokens, for the next step to verify.
        num_drafted, num_accepted: of all drafts so far, how many were verified, and were right.
        num_verifies: steps in which some were.
        num_cached_tokens: prompt tokens taken from the prefix cache at first admission.
        split_at: a chunk must end there (capacity.Admitted).
        preemptions, lost_tokens, replayed_tokens: how often it was preempted, the most it had computed
            by then, and how many tokens it has computed again in all.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    sample_index: int = 0
    adapter: str = ""
    end_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    in_flight: int = 0
    drafts: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifies: int = 0
    num_cached_tokens: int = 0
    split_at: int | None = None
    cache_id: int | None = None
    state: RequestState = RequestState.WAITING
    preemptions: int = 0
    lost_tokens: int = 0
    replayed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Known ones and those in flight."""
        return len(self.prompt) + len(self.output) + self.in_flight

    @property
    def is_at_end(self) -> bool:
        """What is in flight is all that it may still output."""
        return len(self.output) + self.in_flight >= self.max_tokens

    @property
    def needs_output(self) -> bool:
        """Its next step must know what the step in flight will have said."""
        return self.params.looks_back or bool(self.drafts)

    @property
    def is_recomputing(self) -> bool:
        """Preempted once, and not yet back to where it was."""
        return self.num_computed_tokens < self.lost_tokens

    @property
    def is_decoding(self) -> bool:
        """It lacks its last output token alone; what a replay brings back before that is prefill."""
        return bool(self.output or self.in_flight) and self.num_tokens - self.num_computed_tokens == 1

    def advance(self, count: int) -> None:
        """The KV of the next `count` tokens is there, or on its way."""
        before = min(self.num_computed_tokens, self.lost_tokens)
        self.num_computed_tokens += count
        self.replayed_tokens += min(self.num_computed_tokens, self.lost_tokens) - before

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of positions start … end - 1; IN_FLIGHT for those not known yet."""
        split = len(self.prompt)
        known = self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]
        return tuple(known + [IN_FLIGHT] * (end - start - len(known)))
