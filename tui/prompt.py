"""The prompt: several lines, Enter sends, Up and Down at the edges walk through what was sent."""

from __future__ import annotations

import re
from typing import ClassVar

import click
from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

from ferrum_mlx.chat import attachments, commands
from ferrum_mlx.chat.commands import Completion

from .completions import Completions

_FILE = re.compile(r'(?:^|(?<=\s))@("[^"\n]*|[^\s"]*)$')  # a reference that is being typed


class Prompt(TextArea):
    """Obeys its keys in the order they were typed: bindings are looked up here, not by the app, which
    would see the Enter of a fast typist before the letters in front of it had arrived."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="prompt.send"),
        Binding("ctrl+j,shift+enter,alt+enter", "newline", "Newline", id="prompt.newline"),
        Binding("ctrl+d", "end_of_input", "Quit when empty", show=False, id="prompt.eof"),
        Binding("ctrl+g", "edit", "Editor", show=False, id="prompt.editor"),
        Binding("tab", "complete", "Complete", show=False, id="prompt.complete"),
        Binding("end", "end", "Line end, or follow", show=False, id="prompt.end"),
    ]

    class Sent(Message):
        """The user sent `text`; "" is Enter on an empty prompt."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class EndOfInput(Message):
        """Ctrl+D on an empty prompt."""

    def __init__(self, completions: Completions) -> None:
        super().__init__(
            soft_wrap=True, show_line_numbers=False, highlight_cursor_line=False, placeholder="Ask something"
        )
        self.border_title = "prompt"
        self._completions = completions
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
        if event.key == "escape" and self._completions.marked is not None:
            self._completions.offer(())
        elif active is not None and active.node is self:
            await self.run_action(active.binding.action)
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    def on_text_area_changed(self) -> None:
        self._completions.offer(self._choices())

    def _choices(self) -> list[Completion]:
        """What fits the text up to the cursor, unless an earlier prompt is being looked at."""
        before = self.get_text_range((0, 0), self.cursor_location)
        if self._place < len(self._sent) or before != self.text:
            return []
        if typed := _FILE.search(before):
            return [Completion(path, path) for path in attachments.complete(typed[1].removeprefix('"'))]
        return commands.complete(before) if before.startswith("/") and "\n" not in before else []

    def action_complete(self) -> None:
        marked = self._completions.marked
        if marked is None:
            self.screen.focus_next()
        elif typed := _FILE.search(self.text):
            written = attachments.reference(marked.text)
            self.put(self.text[: typed.start()] + written + ("" if marked.text.endswith("/") else " "))
        else:
            self.put(marked.text)

    def action_send(self) -> None:
        text = self.text if self.text.strip() else ""
        if text:
            self.put("")
            self.remember(text)
        self.post_message(self.Sent(text))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_end(self) -> None:
        """The end of the line; from an empty prompt, that of the transcript."""
        if self.text:
            self.action_cursor_line_end()
        else:
            self.app.call_later(self.app.run_action, "follow")

    def action_end_of_input(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.EndOfInput())

    def action_edit(self) -> None:
        """Go on writing in the user's own editor ($VISUAL, $EDITOR)."""
        try:
            with self.app.suspend():
                text = click.edit(self.text, extension=".md", require_save=False)
        except (click.ClickException, SuspendNotSupported) as error:
            self.notify(f"no editor: {error}; set EDITOR to one", severity="error", markup=False)
        else:
            self.put((text or "").removesuffix("\n"))

    def action_cursor_up(self, select: bool = False) -> None:
        if self._completions.marked is not None:
            self._completions.move(-1)
        elif select or not self._at_top:
            super().action_cursor_up(select)
        else:
            self._recall(self._place - 1)

    def action_cursor_down(self, select: bool = False) -> None:
        if self._completions.marked is not None:
            self._completions.move(1)
        elif select or not self._at_bottom:
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
