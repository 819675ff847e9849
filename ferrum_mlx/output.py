"""A request's way out: tokens to text, stop checks, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ferrum_mlx.detokenizer import StopStrings
from ferrum_mlx.messages import ChatMessage
from ferrum_mlx.metrics import Timings, Usage
from ferrum_mlx.request import Request


class IncrementalText(Protocol):
    def add(self, token_id: int) -> str:
        """Text that is safe to show now."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class TextCodec(Protocol):
    """Text ↔ ids, as the engine needs it."""

    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]: ...

    def detokenizer(self) -> IncrementalText: ...


class OutputStream:
    """Times are seconds on one monotonic clock, given by the caller."""

    def __init__(self, request: Request, codec: TextCodec, arrived: float) -> None:
        self.request = request
        self._eos = frozenset() if request.params.ignore_eos else codec.eos_token_ids
        self._detokenizer = codec.detokenizer()
        self._stops = StopStrings(request.params.stop)
        self._arrived = arrived
        self._prefill_started = 0.0
        self._first_token = self._last_token = 0.0

    def scheduled(self, now: float) -> None:
        self._prefill_started = self._prefill_started or now

    def add(self, token: int, now: float) -> tuple[str, str | None]:
        """Take a sampled token; returns the text it lets out, and the finish reason or None."""
        request = self.request
        request.output.append(token)
        self._first_token = self._first_token or now
        self._last_token = now
        if token in self._eos:
            return self.flush(), "stop"
        text, stopped = self._stops.feed(self._detokenizer.add(token))
        if stopped:
            return text, "stop"
        if len(request.output) >= request.max_tokens:
            tail, stopped = self._tail()
            return text + tail, "stop" if stopped else "length"
        return text, None

    def flush(self) -> str:
        """The held tail, when nothing more will come."""
        return self._tail()[0]

    def _tail(self) -> tuple[str, bool]:
        text, stopped = self._stops.feed(self._detokenizer.finish())
        return (text, True) if stopped else (text + self._stops.finish(), False)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.request.output),
            cached_tokens=self.request.num_cached_tokens,
        )

    def timings(self) -> Timings:
        if not self.request.output:
            return Timings(0.0, 0.0, 0.0)
        prefilled = len(self.request.prompt) - self.request.num_cached_tokens
        return Timings(
            ttft_s=self._first_token - self._arrived,
            prefill_tps=_rate(prefilled, self._first_token - self._prefill_started),
            decode_tps=_rate(len(self.request.output) - 1, self._last_token - self._first_token),
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
