"""What goes into a forward and what comes out of it: ids, lengths and handles, no array of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ferrum_mlx.sampling import GREEDY, SamplingParams

if TYPE_CHECKING:
    import numpy as np


IN_FLIGHT = -1  # in q_tokens: the token that the pending step samples for this cache


class LogitsPolicy(Enum):
    """What an item wants for each row that reaches the output head."""

    SAMPLED = "sampled"
    GREEDY = "greedy"
    FULL = "full"  # the sampled token and the row's logits
    PROMPT_LOGPROBS = "prompt logprobs"  # every row reaches the head; see UnifiedItem.targets


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How an item's rows are sampled; row i of a verify item has output position `position + i`.

    The noise of a row is a pure function of (seed, sample_index, output position).

    Attributes:
        prompt, output: the ids known before the row, for penalties; empty where there are none.
        end_ids: ids that end the request, not to be sampled before params.min_tokens.
        bad_sequences: params.bad_words as ids, none of them empty.
    """

    params: SamplingParams = GREEDY
    seed: int = 0
    sample_index: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    end_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def barred(self) -> set[int]:
        """Ids that must not be sampled; the vocabulary may lack some of them."""
        barred = set(self.params.banned_token_ids)
        if self.position < self.params.min_tokens:
            barred.update(self.end_ids)
        for *start, last in self.bad_sequences:
            if list(self.output[len(self.output) - len(start) :]) == start:
                barred.add(last)
        return barred

    def at(self, row: int, drafts: Sequence[int] = ()) -> RowSampling:
        """The sampling of an item's row `row`, the drafts before it counted as output."""
        if not row:
            return self
        output = (*self.output, *drafts[:row]) if self.params.looks_back else self.output
        return replace(self, position=self.position + row, output=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedItem:
    """One sequence's share of a step.

    Attributes:
        q_tokens: the ids to compute, at least one. IN_FLIGHT alone stands for the id that the step in
            flight samples last for this cache, so that a decode need not wait for it.
        pos_offset: absolute position of the first of them; equals the cache's computed length.
        is_final_chunk: the last row is sampled; False for a chunk inside the prompt.
        verify: every row is sampled (q_tokens = the last token, then the drafts).
        targets: for PROMPT_LOGPROBS, the known id behind each row, as far as it is a prompt's: one a
            row of an intermediate chunk, one fewer of the final one.
    """

    cache_id: int
    q_tokens: tuple[int, ...]
    pos_offset: int
    is_final_chunk: bool = True
    verify: bool = False
    sampling: RowSampling = RowSampling()
    logits: LogitsPolicy = LogitsPolicy.SAMPLED
    targets: tuple[int, ...] = ()

    @property
    def num_rows_out(self) -> int:
        """Rows that reach the output head: the item's last ones."""
        if self.verify or self.logits is LogitsPolicy.PROMPT_LOGPROBS:
            return len(self.q_tokens)
        return self.num_sampled

    @property
    def num_sampled(self) -> int:
        """Rows that are sampled: the last ones of those that reach the head."""
        if self.verify:
            return len(self.q_tokens)
        return 1 if self.is_final_chunk else 0

    @property
    def row_sampling(self) -> list[RowSampling]:
        """The sampling of each sampled row."""
        if self.logits is LogitsPolicy.GREEDY:
            return [RowSampling()] * self.num_sampled
        return [self.sampling.at(row, self.q_tokens[1:]) for row in range(self.num_sampled)]


@dataclass(frozen=True, slots=True)
class UnifiedBatch:
    items: tuple[UnifiedItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.q_tokens) for item in self.items)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs of the model's own probabilities: before penalties, bias, bans and temperature.

    `rank` is 1 for the likeliest token; `top` holds the likeliest (id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item's outcome.

    Attributes:
        token_ids: one id a sampled row.
        logits: [rows that reached the head, vocab_size] float32, for FULL.
        logprobs: one a token id, where params.logprobs asks for them.
        prompt_logprobs: one a target.
        num_tokens: how many of q_tokens were computed; None is all. Fewer only of a chunk, and then
            nothing was sampled; never while a step ahead goes on from its end.
    """

    cache_id: int
    token_ids: tuple[int, ...]
    logits: np.ndarray | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_tokens: int | None = None
