"""The conversation as it stands on screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.sanitize import sanitize

from .message import Answer, Place, UserMessage

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
        super().__init__()
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

    async def show(self, path: Sequence[Message], place: Callable[[Message], Place]) -> None:
        """These messages instead of what is there."""
        await self.remove_children()
        for message in path:
            if message.role == "user":
                await self.mount(UserMessage(message, place(message)))
            else:
                await self.reopen(message, place(message))
                await self.query(Answer).last().finish()
        self.follow()

    async def reopen(self, message: Message, place: Place) -> Answer:
        """An answer that is there, or is to be, at the end, as one that still grows."""
        for widget in self.query(Answer):
            if widget.message is message:
                await widget.remove()
        answer = Answer(message, place)
        await self.add(answer)
        return await answer.fill()

    async def clear(self, model: str) -> None:
        """Back to an empty conversation."""
        await self.remove_children()
        await self.mount(Welcome(model))

    def follow(self) -> None:
        self.scroll_end(animate=False)

    def scroll_pages(self, pages: int) -> None:
        if pages < 0:
            self.scroll_page_up(animate=False)
        else:
            self.scroll_page_down(animate=False)
