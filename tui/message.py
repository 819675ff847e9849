"""A message on screen: who speaks and when, the text, and what can be asked for it by key."""

from __future__ import annotations

import time
from typing import Self

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.sanitize import sanitize

from .status import duration
from .streamed import StreamedMarkdown

_THOUGHT_SHOWN = 60  # characters
Place = tuple[int, int]  # which of how many branches a message is, from 1


class MessageWidget(Vertical):
    """One message of the conversation."""

    class Edit(Event):
        def __init__(self, widget: MessageWidget) -> None:
            super().__init__()
            self.message_id = widget.message.id

    class Regenerate(Edit):
        pass

    class Continue(Edit):
        pass

    class Branch(Event):
        def __init__(self, widget: MessageWidget, step: int) -> None:
            super().__init__()
            self.message_id, self.step = widget.message.id, step

    class Copy(Event):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, message: Message, place: Place = (1, 1)) -> None:
        super().__init__()
        self.message = message
        self._head = Static(markup=False, classes="speaker")
        self.set_place(place)

    def set_place(self, place: Place) -> None:
        """Which of how many branches this is."""
        message = self.message
        speaker = "You" if message.role == "user" else message.model
        label = f" · {message.label}" if message.label else ""
        clock = time.strftime("%H:%M", time.localtime(message.created))
        branch = f" · branch {place[0]}/{place[1]}" if place[1] > 1 else ""
        self._head.update(
            Content.assemble(
                sanitize(speaker), (f"  {clock}{sanitize(label)}{branch}", "$foreground 55% not bold")
            )
        )


class UserMessage(MessageWidget):
    def compose(self) -> ComposeResult:
        yield self._head
        yield Static(Content(sanitize(self.message.text)), classes="said")
        if self.message.attached:
            names = "  ".join(self.message.attached)
            yield Static(Content(f"with {sanitize(names)}"), classes="attached")


class Thought(Static):
    """One dim line: the end of what is being thought; when that is over, how much it was."""

    def __init__(self) -> None:
        super().__init__(markup=False, classes="thought")
        self._characters = 0
        self._end = ""
        self._over = False

    def add(self, text: str) -> None:
        """Add sanitized text."""
        self._characters += len(text)
        self._end = (self._end + text)[-2 * _THOUGHT_SHOWN :]
        line = self._end.rstrip().rpartition("\n")[2][-_THOUGHT_SHOWN:]
        self.add_class("begun")
        self.update(Content(f"thinking · {line}"))

    def end(self) -> None:
        if self._characters and not self._over:
            self._over = True
            self.update(Content(f"thought · {self._characters:,} characters"))


class Answer(MessageWidget):
    """What was thought, the text, and a line below that says how it went."""

    def __init__(self, message: Message, place: Place = (1, 1)) -> None:
        super().__init__(message, place)
        self.thought = Thought()
        self.body = StreamedMarkdown()
        self._below = Static(markup=False, classes="below")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.thought
        yield self.body
        yield self._below

    async def fill(self) -> Self:
        """Show what the message has so far."""
        if self.message.thinking:
            self.think(self.message.thinking)
        if self.message.text:
            await self.add(self.message.text)
        return self

    def think(self, text: str) -> None:
        self.thought.add(sanitize(text))

    async def add(self, text: str) -> None:
        self.thought.end()
        await self.body.feed(sanitize(text))

    async def finish(self) -> None:
        self.thought.end()
        await self.body.finish()
        below = summary(self.message)
        self._below.display = bool(below)
        self._below.update(Content(below))


def summary(message: Message) -> str:
    """The line below a finished answer."""
    notes = {
        "abort": "■ stopped",
        "length": "■ cut at its length limit",
        "broken": "■ broken off",
        "": "■ broken off",
    }
    parts = [notes.get(message.ending, "")]
    usage, timings = message.usage, message.timings
    if usage is not None and timings is not None:
        parts += [
            f"{usage.completion_tokens:,} tok",
            f"{timings.decode_tps:,.1f} tok/s",
            f"TTFT {duration(timings.ttft_s)}",
        ]
        if usage.cached_tokens:
            parts.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tok cached")
    return " · ".join(filter(None, parts))
