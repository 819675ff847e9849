"""The prompt: several lines, Enter sends, Up and Down at the edges walk through what was sent."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea


class Prompt(TextArea):
    """Obeys its keys in the order they were typed: bindings are looked up here, not by the app, which
    would see the Enter of a fast typist before the letters in front of it had arrived."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="prompt.send"),
        Binding("ctrl+j,shift+enter,alt+enter", "newline", "Newline", id="prompt.newline"),
        Binding("ctrl+d", "end_of_input", "Quit when empty", show=False, id="prompt.eof"),
    ]

    class Sent(Message):
        """The user sent `text`; "" is Enter on an empty prompt."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class EndOfInput(Message):
        """Ctrl+D on an empty prompt."""

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, highlight_cursor_line=False, placeholder="Ask something"
        )
        self.border_title = "prompt"
        self._sent: list[str] = []
        self._place = 0  # in _sent; its length stands for the draft
        self._draft = ""

    def put(self, text: str) -> None:
        """Replace the text, cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def remember(self, text: str) -> None:
        """Add to what Up brings back."""
        if self._sent[-1:] != [text]:
            self._sent.append(text)
        self._place = len(self._sent)

    async def _on_key(self, event: Key) -> None:
        active = self.screen.active_bindings.get(event.key)
        if active is None or active.node is not self:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        await self.run_action(active.binding.action)

    def action_send(self) -> None:
        text = self.text if self.text.strip() else ""
        if text:
            self.put("")
            self.remember(text)
        self.post_message(self.Sent(text))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_end_of_input(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.EndOfInput())

    def action_cursor_up(self, select: bool = False) -> None:
        if select or not self._at_top:
            super().action_cursor_up(select)
        else:
            self._recall(self._place - 1)

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self._at_bottom:
            super().action_cursor_down(select)
        else:
            self._recall(self._place + 1)

    @property
    def _at_top(self) -> bool:
        """On the first line as it is wrapped on screen."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y == 0

    @property
    def _at_bottom(self) -> bool:
        return (
            self.wrapped_document.location_to_offset(self.cursor_location).y
            == self.wrapped_document.height - 1
        )

    def _recall(self, place: int) -> None:
        if not 0 <= place <= len(self._sent):
            return
        if self._place == len(self._sent):
            self._draft = self.text
        self._place = place
        self.put(self._draft if place == len(self._sent) else self._sent[place])
