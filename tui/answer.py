"""An answer on screen: what was thought, the text as it comes, and a line below that says how it went."""

from __future__ import annotations

from typing import Self

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.sanitize import sanitize

from .message import MessageWidget, Place
from .status import duration
from .streamed import StreamedMarkdown

_THOUGHT_SHOWN = 60  # characters of the line that shows thinking as it comes
_MEASURED = 0.001  # seconds; less is thinking and answer in one part
_LIVE = 2000  # characters shown of it, where it is unfolded
_ENDINGS = {
    "abort": "■ stopped",
    "length": "■ cut at its length limit",
    "broken": "■ broken off",
    "": "■ broken off",  # the program died over it
}


class Thought(Static):
    """The end of what is being thought; when that is over, how long it took, and at a click all of it."""

    def __init__(self, message: Message) -> None:
        super().__init__(markup=False, classes="thought")
        self._answer = message
        self._open = False
        self._over = False

    def show(self) -> None:
        """Show what the message has."""
        thinking = self._answer.thinking
        self.set_class(bool(thinking), "begun")
        self.set_class(self._open, "open")
        line = self._summary() if self._over else f"thinking · {_last_line(thinking)}"
        self.update(Content(f"{line}\n{self._shown(thinking)}" if self._open else line))

    def _shown(self, text: str) -> str:
        """All of it once it is over; until then its end, as each flush draws it anew."""
        if self._over or len(text) <= _LIVE:
            return sanitize(text).strip()
        return "…\n" + sanitize(text[-_LIVE:]).partition("\n")[2].strip()

    def _summary(self) -> str:
        """With its time: how many of the tokens it took is not known, as one may hold the end of it."""
        seconds = self._answer.thought_s
        took = f" for {duration(seconds)}" if seconds >= _MEASURED else ""
        return f"{'▾' if self._open else '▸'} thought{took}"

    def end(self) -> None:
        if not self._over and self._answer.thinking:
            self._over = True
            self.show()

    def toggle(self) -> None:
        self._open = not self._open
        self.show()

    def on_click(self) -> None:
        if not self.screen.get_selected_text():
            self.toggle()


def _last_line(text: str) -> str:
    return sanitize(text[-2 * _THOUGHT_SHOWN :]).rstrip().rpartition("\n")[2][-_THOUGHT_SHOWN:]


class Answer(MessageWidget):
    """Grows by `think` and `add`, whose text the message has already; `finish` ends it."""

    def __init__(self, message: Message, place: Place = (1, 1)) -> None:
        super().__init__(message, place)
        self.thought = Thought(message)
        self.body = StreamedMarkdown()
        self._below = Static(markup=False, classes="below")

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.thought
        yield self.body
        yield self._below

    async def fill(self) -> Self:
        """Show what the message has so far."""
        self.thought.show()
        if self.message.text:
            await self.add(self.message.text)
        return self

    def think(self) -> None:
        self.thought.show()

    async def add(self, text: str) -> None:
        self.thought.end()
        await self.body.feed(sanitize(text))

    async def finish(self) -> None:
        self.thought.end()
        await self.body.finish()
        below = summary(self.message)
        self._below.display = bool(below)
        self._below.update(Content(below))

    def action_fold(self) -> None:
        self.thought.toggle()


def summary(message: Message) -> str:
    """How an answer went, in a line."""
    parts = [_ENDINGS.get(message.ending, "")]
    usage, timings = message.usage, message.timings
    if usage is not None and timings is not None:
        speed = f"{timings.decode_tps:,.1f} tok/s"
        parts += [f"{usage.completion_tokens:,} tok", speed, f"TTFT {duration(timings.ttft_s)}"]
        if usage.cached_tokens:
            parts.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tok cached")
    return " · ".join(filter(None, parts))
