"""A request's way out: tokens to text, stop checks, what is said of it at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ferrum_mlx.batch import TokenLogprobs
from ferrum_mlx.detokenizer import Detokenizer, StopStrings
from ferrum_mlx.messages import ChatMessage, ChatOptions
from ferrum_mlx.metrics import RequestStats, Usage
from ferrum_mlx.request import Request, RequestState
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.thinking import Split, Splitter, Unsplit
from ferrum_mlx.timing import RequestTimer
from ferrum_mlx.view import RequestView


class TextCodec(Protocol):
    """Text ↔ ids, as the engine needs it."""

    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = ...) -> list[int]: ...

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences that spell SamplingParams.bad_words, in front of a text and within one."""
        ...

    def detokenizer(self, *, with_tags: bool = False) -> Detokenizer:
        """A fresh one; `with_tags` shows the special tokens that a splitter looks for, too."""
        ...

    def splitter(self, prompt: Sequence[int]) -> Splitter:
        """A fresh one, for the answer to a templated conversation."""
        ...


@dataclass(frozen=True, slots=True)
class NewText:
    """What a token let out; finish_reason is None while the output goes on."""

    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None


def end_ids(params: SamplingParams, codec: TextCodec) -> frozenset[int]:
    """Ids at which an output ends; a sampler bans them before `min_tokens`."""
    own = frozenset() if params.ignore_eos else codec.eos_token_ids
    return own | frozenset(params.stop_token_ids)


class OutputStream:
    """Times are seconds on one monotonic clock, given by the caller.

    Only a conversation's answer is split into thinking and text; a bare prompt's completion is all
    text. Stop strings are looked for in the text alone, as by vLLM with a reasoning parser: a line
    break that a model thinks of must not end its answer. `min_tokens` goes as in vLLM: an id ends the
    output from that token on, a stop string if a later token completes it; one that is complete before
    is passed over.
    """

    def __init__(self, request: Request, codec: TextCodec, arrived: float, is_chat: bool = False) -> None:
        self.request = request
        params = request.params
        self._end_ids = end_ids(params, codec)
        self._detokenizer = codec.detokenizer(with_tags=is_chat)
        self._splitter = codec.splitter(request.prompt) if is_chat else Unsplit()
        self._stops = StopStrings(params.stop)
        self.timer = RequestTimer(arrived)
        self.prompt_logprobs: list[TokenLogprobs] = []

    def add(self, token: int, now: float) -> NewText:
        """Take a sampled token; returns the text it lets out, and the finish reason or None."""
        request = self.request
        request.output.append(token)
        self.timer.token(now)
        count = len(request.output)
        if token in self._end_ids and count >= request.params.min_tokens:
            return self._end("", "stop")
        if count >= request.max_tokens:
            return self._end(self._detokenizer.add(token), "length")
        split = self._splitter.feed(self._detokenizer.add(token))
        text, stopped = self._look_for_stops(split.answer)
        return NewText(text, split.thinking, "stop" if stopped else None)

    def add_all(self, tokens: Sequence[int], now: float) -> tuple[NewText, int]:
        """Take tokens that came at once, up to one that ends the output; how many that was."""
        all_new = NewText()
        before = len(self.request.output)
        for token in tokens:
            new = self.add(token, now)
            all_new = NewText(all_new.text + new.text, all_new.thinking + new.thinking, new.finish_reason)
            if new.finish_reason:
                break
        return all_new, len(self.request.output) - before

    def take_prompt_logprobs(self, position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of the prompt's tokens from `position` on; a replay brings some again."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) + 1 - position :]

    def flush(self) -> NewText:
        """The held tail, when nothing more will come."""
        return self._end("", None)

    def _end(self, text: str, reason: str | None) -> NewText:
        first = self._splitter.feed(text + self._detokenizer.finish())
        rest = self._splitter.finish()
        split = Split(first.answer + rest.answer, first.thinking + rest.thinking)
        text, stopped = self._look_for_stops(split.answer)
        if stopped:
            return NewText(text, split.thinking, "stop")
        return NewText(text + self._stops.finish(), split.thinking, reason)

    def _look_for_stops(self, text: str) -> tuple[str, bool]:
        return self._stops.feed(text, armed=len(self.request.output) > self.request.params.min_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.request.output),
            cached_tokens=self.request.num_cached_tokens,
        )

    def view(self, now: float) -> RequestView:
        """The request between two steps."""
        request = self.request
        state, new = request.state.value, request.num_computed_tokens - request.num_cached_tokens
        if request.state is RequestState.RUNNING:
            state = "decode" if request.is_decoding else "prefill"
        return RequestView(
            request_id=request.request_id,
            state=state,
            prompt_tokens=len(request.prompt),
            computed_tokens=request.num_computed_tokens,
            cached_tokens=request.num_cached_tokens,
            output_tokens=len(request.output),
            age_s=now - self.timer.arrived,
            ttft_s=self.timer.ttft_s,
            tokens_per_second=self.timer.pace(now, new) if request.state is RequestState.RUNNING else 0.0,
            preemptions=request.preemptions,
        )

    def stats(self, finish_reason: str, now: float) -> RequestStats:
        """All that is to be said of the request at its end."""
        return self.timer.stats(self.request, self.usage(), finish_reason, now)
