"""How a request's tokens are chosen and when it ends. Plain data; each backend's sampler obeys it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.plain import number, whole

GREEDY_BELOW = 1e-5  # vLLM's bound, too; dividing by less overflows float32
MAX_LOGPROBS = 20  # alternatives a token, as in vLLM: the lists are read back and sent on at every step
MAX_SAMPLES = 16_384  # of one prompt, as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The names follow vLLM's class of the same name. What is out of range is refused.

    Lists may be given for tuples, a text for a tuple of one, None for an empty one, numpy's numbers for
    Python's.

    Attributes:
        max_tokens: most output tokens; None is as many as the context leaves.
        min_tokens: no end-of-sequence and no stop before that many output tokens.
        temperature: 0 is greedy, and so is anything below 1e-5, as in vLLM.
        top_p: keep the smallest set of tokens whose probability reaches it, 0 < top_p <= 1.
        top_k: keep the k likeliest tokens; 0 keeps all, and so does -1, as in vLLM.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        xtc_probability: how often all but the least likely of the tokens above xtc_threshold are dropped;
            needs a temperature.
        xtc_threshold: probability, 0 to 0.5.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the
            output; 1 is off.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and per
            occurrence; 0 is off.
        logit_bias: token id → added to its logit, -100 to 100; keys may be digits, as JSON has them.
        banned_token_ids: never sampled.
        bad_words: texts whose last token is never sampled behind the others; the output alone counts.
        n: samples of the same prompt, each with noise of its own; they share the prompt's KV blocks.
            More than one needs a temperature.
        seed: noise is a pure function of (seed, sample index, output position); None draws a fresh seed.
        stop: texts at which the output ends; they are not part of it.
        stop_token_ids: ids at which the output ends, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens (benchmarks).
        priority: requests with a lower number are admitted first, and preempted last.
        logprobs: None for none, else each output token's own and as many of the likeliest, at most 20.
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
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def looks_back(self) -> bool:
        """Whether a row's logits depend on the ids before it, beyond what the model makes of them."""
        return self.penalizes or bool(self.bad_words)

    @property
    def penalizes(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def __post_init__(self) -> None:
        for name, plain, words in _RULES:
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, plain(value))
            except _NOT_PLAIN:
                raise UsageError(f"{name} is {shown(value)}", f"allowed: {words}") from None
        collections = {
            "logit_bias": _biases(self.logit_bias),
            **{name: _texts(name, getattr(self, name)) for name in ("stop", "bad_words")},
            **{name: _ids(name, getattr(self, name)) for name in ("banned_token_ids", "stop_token_ids")},
        }
        for name, value in collections.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens is {shown(self.min_tokens)}",
                f"allowed: 0 to {shown(self.max_tokens)}, max_tokens",
            )
        if self.n > 1 and self.greedy:
            raise UsageError(
                f"n is {self.n} at temperature {self.temperature:g}, where all samples are the same",
                "allowed: 1",
                "raise the temperature, or leave n away",
            )
        if self.xtc_probability and self.greedy:
            raise UsageError(
                f"xtc_probability is {self.xtc_probability:g} at temperature {self.temperature:g}, where the "
                "likeliest token is taken",
                "allowed: 0",
                "raise the temperature, or leave XTC away",
            )


def check_vocab(
    params: SamplingParams,
    vocab_size: int,
    end_ids: Iterable[int] = (),
    bad_sequences: Iterable[Sequence[int]] = (),
) -> None:
    """See that a model of that vocabulary can obey params.

    Args:
        end_ids: not to be sampled before min_tokens; those out of the vocabulary never are.
        bad_sequences: bad_words as ids.

    Raises:
        UsageError: an id the vocabulary does not have, or nothing is left to sample.
    """
    for name in ("logit_bias", "banned_token_ids", "stop_token_ids"):
        if wrong := [token for token in getattr(params, name) if token >= vocab_size]:
            raise UsageError(
                f"{name} has the token id {shown(wrong[0])}",
                f"allowed: 0 to {vocab_size - 1}, the model's vocabulary",
            )
    if not all(sequences := list(bad_sequences)):
        raise UsageError(f"bad_words is {shown(params.bad_words)}", "allowed: texts of at least one token")
    barred = {*params.banned_token_ids, *(sequence[-1] for sequence in sequences)}
    barred.update(end_ids if params.min_tokens else ())
    if barred.issuperset(range(vocab_size)):
        raise UsageError(
            f"all {vocab_size} tokens of the vocabulary may be barred at once",
            "allowed: at least one that banned_token_ids, bad_words and min_tokens leave",
        )


_NOT_PLAIN = (TypeError, ValueError, OverflowError)  # what the following raise for what is not allowed


def _between(low: float, high: float, *, above: bool = False) -> Callable[[object], float]:
    """From low to high, or from above low."""

    def plain(value: object) -> float:
        given = number(value)
        if not low <= given <= high or (above and given == low):  # no NaN: it compares as False
            raise ValueError
        return given

    return plain


_bias = _between(-100, 100)


def _whole(low: int, high: float = math.inf, *, or_none: bool = False) -> Callable[[object], int | None]:
    def plain(value: object) -> int | None:
        if value is None and or_none:
            return None
        given = whole(value)
        if not low <= given <= high:
            raise ValueError
        return given

    return plain


def _top_k(value: object) -> int:
    if (given := whole(value)) < -1:
        raise ValueError
    return max(0, given)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts: tuple[object, ...] | None = None
    if isinstance(value, str):
        texts = (value,)
    elif value is None or isinstance(value, Iterable):
        texts = tuple(value or ())
    checked = tuple(text for text in texts or () if isinstance(text, str) and text)
    if texts is None or len(checked) < len(texts):
        raise UsageError(f"{name} is {shown(value)}", "allowed: texts of at least one character")
    return checked


def _ids(name: str, value: object) -> tuple[int, ...]:
    try:
        if value is None:
            return ()
        if isinstance(value, Iterable):
            return tuple(_id(token) for token in value)
    except (TypeError, ValueError):
        pass
    raise UsageError(f"{name} is {shown(value)}", "allowed: token ids, whole numbers of at least 0")


def _id(value: object) -> int:
    if (token := whole(value)) < 0:
        raise ValueError
    return token


def _biases(value: object) -> dict[int, float]:
    biases: dict[int, float] = {}
    pairs = {} if value is None else value
    if not isinstance(pairs, Mapping):
        raise UsageError(
            f"logit_bias is {shown(value)}", "allowed: token ids, each with a number from -100 to 100"
        )
    for key, bias in pairs.items():
        try:
            token = _id(int(key) if isinstance(key, str) else key)
        except (TypeError, ValueError):
            raise UsageError(
                f"logit_bias has the key {shown(key)}", "allowed: token ids, whole numbers of at least 0"
            ) from None
        try:
            biases[token] = _bias(bias)
        except _NOT_PLAIN:
            raise UsageError(
                f"logit_bias of token {shown(token)} is {shown(bias)}", "allowed: -100 to 100"
            ) from None
    return biases


# (field, its value as a plain one, what is allowed)
_RULES: tuple[tuple[str, Callable[[object], object], str], ...] = (
    ("max_tokens", _whole(1, or_none=True), "a whole number of at least 1"),
    ("min_tokens", _whole(0), "a whole number of at least 0"),
    ("temperature", _between(0, 100), "0 (greedy) to 100"),
    ("top_p", _between(0, 1, above=True), "above 0, at most 1 (1 keeps every token)"),
    ("top_k", _top_k, "a whole number of at least 0 (0 keeps every token)"),
    ("ignore_eos", _switch, "True or False"),
    ("priority", _whole(-(2**63), 2**63), "a whole number; a lower one goes first"),
    ("min_p", _between(0, 1), "0 (keeps every token) to 1"),
    ("xtc_probability", _between(0, 1), "0 (off) to 1"),
    ("xtc_threshold", _between(0, 0.5), "0 to 0.5"),
    ("repetition_penalty", _between(0.01, 100), "0.01 to 100 (1 is off)"),
    ("presence_penalty", _between(-2, 2), "-2 to 2 (0 is off)"),
    ("frequency_penalty", _between(-2, 2), "-2 to 2 (0 is off)"),
    ("n", _whole(1, MAX_SAMPLES), f"a whole number from 1 to {MAX_SAMPLES}"),
    ("seed", _whole(0, 2**64 - 1, or_none=True), "a whole number from 0 to 2^64 - 1"),
    ("logprobs", _whole(0, MAX_LOGPROBS, or_none=True), f"0 to {MAX_LOGPROBS} of the likeliest, or None"),
    (
        "prompt_logprobs",
        _whole(0, MAX_LOGPROBS, or_none=True),
        f"0 to {MAX_LOGPROBS} of the likeliest, or None",
    ),
)
GREEDY = SamplingParams()
