"""One answer in the making: its message as far as it has come, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from ferrum_mlx.chat.conversation import Ending, Message
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Delta, Failed, Finished
from ferrum_mlx.stream import RequestStream

from .answer import Answer
from .status import Status

_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "abort"}
_SHORTEST = 0.25  # seconds; a speed over less is noise of the timer that drains


@dataclass(frozen=True, slots=True)
class Drained:
    """New text of an answer, and of what was thought before it."""

    text: str = ""
    thinking: str = ""


@dataclass(slots=True)
class Turn:
    """`stream` is None until the engine takes requests. Numbers seen here are the user's: they
    include the way to the screen; the engine's own replace them at the end.

    Attributes:
        answer: grows, below its prompt.
        asked: the prompt that this turn has added; None where it answers an older one again.
        back_to: the leaf to return to if nothing comes of it.
        continues: the answer had text before this turn.
        added: the answer is this turn's own; what is not goes on from its end.
        on_screen: the widget can take what comes.
    """

    answer: Message
    widget: Answer
    asked: Message | None = None
    back_to: int | None = None
    continues: bool = False
    added: bool = True
    on_screen: bool = False
    stream: RequestStream | None = None
    stopping: bool = False
    tokens: int = 0
    end: Finished | None = None
    error: FerrumError | None = None
    _sent: float = field(default=0.0, init=False)
    _first: float = field(default=0.0, init=False)
    _at_first: int = field(default=0, init=False)  # tokens that were there at once: their time is not known
    _latest: float = field(default=0.0, init=False)
    _thought: float = field(default=0.0, init=False)  # when thinking began

    @property
    def ended(self) -> bool:
        return self.end is not None or self.error is not None

    @property
    def came(self) -> bool:
        """There is something to keep: a token may be a part of a tag or of a character only."""
        return self.tokens > 0 and not self.answer.came_to_nothing

    def sent(self, stream: RequestStream) -> None:
        self.stream = stream
        self._sent = perf_counter()

    def drain(self) -> Drained:
        """Take what has arrived into the answer; returns what is new."""
        if self.stream is None:
            return Drained()
        texts: list[str] = []
        thoughts: list[str] = []
        for event in self.stream.drain():
            match event:
                case Delta(_, text, token_ids, thinking):
                    self.tokens += len(token_ids)
                    texts.append(text)
                    thoughts.append(thinking)
                case Finished(_, stats):
                    self.end = event
                    self.answer.usage, self.answer.timings = stats.usage, stats.timings
                    self.answer.ending = _ENDINGS[stats.finish_reason]
                case Failed(_, error):
                    self.error = error
                    if self.tokens:
                        self.answer.ending = "broken"
        if texts:
            self._latest = perf_counter()
            self._first = self._first or self._latest
            self._at_first = self._at_first or self.tokens
        new = Drained("".join(texts), "".join(thoughts))
        self._add(new)
        return new

    def _add(self, new: Drained) -> None:
        if new.thinking:
            self._thought = self._thought or self._latest
        if self._thought and not self.answer.text:
            self.answer.thought_s = self._latest - self._thought
        self.answer.text += new.text
        self.answer.thinking += new.thinking

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
            (self.tokens - self._at_first) / elapsed if elapsed > _SHORTEST else None,
            self._first - self._sent,
        )
