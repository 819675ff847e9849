"""One exchange in hand: a prompt, its answer as far as it has come, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Delta, Failed, Finished
from ferrum_mlx.stream import RequestStream

from .status import Status, duration
from .transcript import Answer, UserMessage

_SHORTEST = 0.25  # seconds; a speed over less is noise of the timer that drains


@dataclass(frozen=True, slots=True)
class Drained:
    """New text of an answer, and of what was thought before it."""

    text: str = ""
    thinking: str = ""


@dataclass(slots=True)
class Turn:
    """`stream` is None until the engine takes requests. Numbers seen here are the user's: they
    include the way to the screen; the engine's own replace them at the end."""

    prompt: str
    asked: UserMessage
    answer: Answer
    stream: RequestStream | None = None
    stopping: bool = False
    parts: list[str] = field(default_factory=list)
    tokens: int = 0
    end: Finished | None = None
    error: FerrumError | None = None
    _sent: float = field(default=0.0, init=False)
    _first: float = field(default=0.0, init=False)
    _latest: float = field(default=0.0, init=False)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def ended(self) -> bool:
        return self.end is not None or self.error is not None

    def sent(self, stream: RequestStream) -> None:
        self.stream = stream
        self._sent = perf_counter()

    def drain(self) -> Drained:
        """Take what has arrived; returns what is new."""
        if self.stream is None:
            return Drained()
        known = len(self.parts)
        thoughts: list[str] = []
        for event in self.stream.drain():
            match event:
                case Delta(_, text, token_ids, thinking):
                    self._latest = perf_counter()
                    self._first = self._first or self._latest
                    self.tokens += len(token_ids)
                    self.parts.append(text)
                    thoughts.append(thinking)
                case Finished():
                    self.end = event
                case Failed(_, error):
                    self.error = error
        return Drained("".join(self.parts[known:]), "".join(thoughts))

    def status(self) -> Status:
        """State and numbers for the status line."""
        if self.end is not None:
            timings = self.end.timings
            return Status("ready", "", self.end.usage.completion_tokens, timings.decode_tps, timings.ttft_s)
        if not self.tokens:
            return Status("prefill" if self.stream else "waiting", "" if self.stream else "for the model")
        elapsed = self._latest - self._first
        return Status(
            "stopping" if self.stopping else "generating",
            "Esc stops",
            self.tokens,
            (self.tokens - 1) / elapsed if elapsed > _SHORTEST else None,
            self._first - self._sent,
        )

    def summary(self) -> str:
        """The line below a finished answer."""
        assert self.end is not None
        usage, timings = self.end.usage, self.end.timings
        numbers = f"{usage.completion_tokens:,} tok · {timings.decode_tps:,.1f} tok/s"
        numbers += f" · TTFT {duration(timings.ttft_s)}"
        if usage.cached_tokens:
            numbers += f" · {usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tok cached"
        notes = {"abort": "■ stopped · ", "length": "■ cut at its length limit · "}
        return notes.get(self.end.finish_reason, "") + numbers
