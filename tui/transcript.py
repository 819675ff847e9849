"""The conversation as it stands on screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from ferrum_mlx.errors import FerrumError
from ferrum_mlx.sanitize import sanitize

from .streamed import StreamedMarkdown

_THOUGHT_SHOWN = 60  # characters
_MOST_MOUNTED = 60  # messages; each is several widgets, and layout visits them all


class Welcome(Static):
    """What an empty conversation shows."""

    def __init__(self, model: str) -> None:
        lines = [
            ("ferrum\n", "bold $accent"),
            ("a local model, and an engine you can see\n\n", "$foreground 55%"),
            (model, "bold"),
            ("\n\nType below and press Enter. F1 lists the keys.", "$foreground 55%"),
        ]
        super().__init__(Content.assemble(*lines))


class UserMessage(Vertical):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(Content("You"), classes="speaker")
        yield Static(Content(sanitize(self._text)), classes="said")


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


class Answer(Vertical):
    """One answer: who speaks, what was thought, the text, and a line below that says how it went."""

    def __init__(self, speaker: str) -> None:
        super().__init__()
        self._speaker = speaker
        self.thought = Thought()
        self.body = StreamedMarkdown()
        self._below = Static(markup=False, classes="below")

    def compose(self) -> ComposeResult:
        yield Static(Content(sanitize(self._speaker)), classes="speaker")
        yield self.thought
        yield self.body
        yield self._below

    def think(self, text: str) -> None:
        self.thought.add(sanitize(text))

    async def add(self, text: str) -> None:
        self.thought.end()
        await self.body.feed(sanitize(text))

    def say_below(self, what: str) -> None:
        self._below.display = bool(what)
        self._below.update(Content(what))

    async def finish(self, below: str) -> None:
        self.thought.end()
        await self.body.finish()
        self.say_below(below)


class Failure(Static):
    """An error, inline: the cause and the next step."""

    def __init__(self, error: FerrumError) -> None:
        cause = ": ".join(part for part in (sanitize(error.what), sanitize(error.allowed)) if part)
        lines = [("✖ ", "bold $text-error"), (cause, "")]
        if error.next_step:
            lines.append((f"\n→ {sanitize(error.next_step)}", "$foreground 55%"))
        super().__init__(Content.assemble(*lines), classes="failure")


class Remark(Static):
    """A dim line of ours between messages."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(sanitize(text)), classes="remark")


class Transcript(VerticalScroll, can_focus=False):
    """Follows its end until the user scrolls up; at the end it follows again."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.border_title = "chat"

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, widget: Widget) -> None:
        """Mount a message below the others."""
        await self.query(Welcome).remove()
        await self.mount(widget)
        surplus = len(self.children) - _MOST_MOUNTED
        if surplus > 0:
            await self.remove_children(self.children[:surplus])
            await self.mount(Remark("earlier messages are no longer shown"), before=0)

    async def clear(self, model: str) -> None:
        """Back to an empty conversation."""
        await self.remove_children()
        await self.mount(Welcome(model))

    def follow(self) -> None:
        self.scroll_end(animate=False)
