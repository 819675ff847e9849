"""A message on screen: who speaks and when, the text, and what can be asked for it by key."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click
from textual.message import Message as Event
from textual.style import Style
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.sanitize import sanitize

from .block import CodeBlock
from .once import LaidOutOnce

_DIM = "$foreground 55%"
Place = tuple[int, int]  # which of how many branches a message is, from 1


class MessageEvent(Event):
    """Something is asked for a message."""

    def __init__(self, widget: MessageWidget) -> None:
        super().__init__()
        self.widget = widget
        self.message_id = widget.message.id


class MessageWidget(LaidOutOnce, Vertical, can_focus=True):
    """One message of the conversation. Shift+Tab goes there from the prompt."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "go(-1)", "Above", show=False, id="message.up"),
        Binding("down,j", "go(1)", "Below", show=False, id="message.down"),
        Binding("y", "copy", "Copy", id="message.copy"),
        Binding("e", "edit", "Edit", id="message.edit"),
        Binding("r", "regenerate", "Again", id="message.regenerate"),
        Binding("c", "go_on", "Continue", id="message.continue"),
        Binding("left,left_square_bracket", "branch(-1)", "Branch before", id="message.previous"),
        Binding("right,right_square_bracket", "branch(1)", "Branch behind", id="message.next"),
        Binding("space,enter", "fold", "Thinking", id="message.fold"),
        Binding("tab", "leave", "To its code, or the prompt", show=False, id="message.leave"),
    ]

    class Go(MessageEvent):
        """To the message so many places on."""

        def __init__(self, widget: MessageWidget, step: int) -> None:
            super().__init__(widget)
            self.step = step

    class Edit(MessageEvent):
        pass

    class Regenerate(MessageEvent):
        pass

    class Continue(MessageEvent):
        pass

    class Branch(MessageEvent):
        def __init__(self, widget: MessageWidget, step: int) -> None:
            super().__init__(widget)
            self.step = step

    class Copy(Event):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, message: Message, place: Place = (1, 1)) -> None:
        super().__init__()
        self.message = message
        self.head = Static(markup=False, classes="speaker")
        self.set_place(place)

    def set_place(self, place: Place) -> None:
        """Which of how many branches this is; the arrows walk by a click, too."""
        self._branches = place[1]
        message = self.message
        clock = time.strftime("%H:%M", time.localtime(message.created))
        label = f" · {message.label}" if message.label else ""
        line = Content.assemble(
            "You" if message.role == "user" else sanitize(message.model),
            (f"  {clock}{sanitize(label)}", f"{_DIM} not bold"),
        )
        if place[1] > 1:
            line = Content.assemble(
                line,
                (" · ", f"{_DIM} not bold"),
                Content("◂ ").stylize(Style.from_meta({"branch": -1})),
                (f"branch {place[0]}/{place[1]}", f"{_DIM} not bold"),
                Content(" ▸").stylize(Style.from_meta({"branch": 1})),
            )
        self.head.update(line)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        answer = self.message.role == "assistant"
        match action:
            case "copy":
                return bool(self.message.text)
            case "edit":
                return not answer
            case "regenerate":
                return answer
            case "go_on":
                return answer and bool(self.message.text) and self.message.ending not in ("", "stop")
            case "branch":
                return self._branches > 1
            case "fold":
                return bool(self.message.thinking)
        return True

    def allow_focus_children(self) -> bool:
        """Shift+Tab from the prompt comes to the message, not to a code block in it."""
        return self.has_focus_within

    def focus_on_click(self) -> bool:
        return False  # the press of a button may begin a selection; `on_click` sees how it ended

    def action_go(self, step: int) -> None:
        self.post_message(self.Go(self, step))

    def action_leave(self) -> None:
        blocks = list(self.query(CodeBlock))
        behind = next((at + 1 for at, block in enumerate(blocks) if block.has_focus), 0)
        if behind < len(blocks):
            blocks[behind].focus()
        else:
            self.screen.focus_next("Prompt")

    def action_copy(self) -> None:
        self.post_message(self.Copy(self.message.text))

    def action_edit(self) -> None:
        self.post_message(self.Edit(self))

    def action_regenerate(self) -> None:
        self.post_message(self.Regenerate(self))

    def action_go_on(self) -> None:
        self.post_message(self.Continue(self))

    def action_branch(self, step: int) -> None:
        self.post_message(self.Branch(self, step))

    def on_click(self, event: Click) -> None:
        if step := event.style.meta.get("branch"):
            self.action_branch(step)

    @on(CodeBlock.Copy)
    def _copy_code(self, event: CodeBlock.Copy) -> None:
        event.stop()
        self.post_message(self.Copy(event.code))


class UserMessage(MessageWidget):
    def compose(self) -> ComposeResult:
        yield self.head
        yield Static(Content(sanitize(self.message.text)), classes="said")
        if self.message.attached:
            yield Static(Content(f"with {sanitize(', '.join(self.message.attached))}"), classes="attached")
