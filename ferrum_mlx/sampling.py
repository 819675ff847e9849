"""How a request's tokens are chosen and when it ends. Plain data; each backend's sampler obeys it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrum_mlx.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The names follow vLLM's class of the same name.

    Attributes:
        max_tokens: most output tokens; None is as many as the context leaves.
        min_tokens: no end-of-sequence and no stop before that many output tokens.
        temperature: 0 is greedy, and so is anything below 1e-5, as in vLLM.
        top_p: keep the smallest set of tokens whose probability reaches it, 0 < top_p <= 1.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        xtc_probability: how often all but the least likely of the tokens above xtc_threshold are dropped.
        xtc_threshold: probability, 0 to 0.5.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the
            output; 1 is off.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and per
            occurrence; 0 is off.
        logit_bias: token id → added to its logit.
        banned_token_ids: never sampled.
        bad_words: texts whose last token is never sampled behind the others.
        n: samples of the same prompt, each with noise of its own; they share the prompt's KV blocks.
        seed: noise is a pure function of (seed, sample index, output position); None draws a fresh seed.
        stop: texts at which the output ends; they are not part of it.
        stop_token_ids: ids at which the output ends, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens (benchmarks).
        logprobs: None for none, else each output token's own and as many of the likeliest.
        prompt_logprobs: the same of the prompt's tokens.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether a row's logits depend on the ids before it, beyond what the model makes of them."""
        penalties = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.bad_words)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop))
        if self.max_tokens is not None and not _whole(self.max_tokens, 1):
            raise UsageError(f"max_tokens is {self.max_tokens!r}", "allowed: a whole number of at least 1")
        if not _number(self.temperature) or not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature is {self.temperature!r}", "allowed: 0 (greedy) to 100")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p!r}", "allowed: above 0, at most 1 (1 keeps every token)")
        if not _whole(self.top_k, 0):
            raise UsageError(
                f"top_k is {self.top_k!r}", "allowed: a whole number of at least 0 (0 keeps every token)"
            )
        if self.seed is not None and not (_whole(self.seed, 0) and self.seed < 2**64):
            raise UsageError(f"seed is {self.seed!r}", "allowed: a whole number from 0 to 2^64 - 1")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise UsageError(f"stop is {self.stop!r}", "allowed: texts of at least one character")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


GREEDY = SamplingParams()
