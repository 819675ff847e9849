"""F1: the keys."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

_KEYS = (
    ("Enter", "send"),
    ("Ctrl+J", "new line; also Shift+Enter and Alt+Enter, where the terminal tells them from Enter"),
    ("Up, Down", "earlier prompts, at the first and last line"),
    ("Esc", "stop the answer; before its first token, take the prompt back"),
    ("Ctrl+C", "copy the selection, else stop, else (twice) quit"),
    ("Ctrl+D", "quit, on an empty prompt"),
    ("Ctrl+N", "new chat"),
    ("PgUp, PgDn", "scroll"),
    ("Ctrl+End", "follow the answer again"),
    ("Ctrl+P", "all commands, themes"),
    ("Ctrl+Q", "quit"),
)


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        width = max(len(keys) for keys, _ in _KEYS)
        lines: list[tuple[str, str]] = []
        for keys, what in _KEYS:
            lines += [(f"{keys:<{width}}  ", "bold $accent"), (f"{what}\n", "")]
        lines.append(("\n/new  /help  /quit work in the prompt, too.", "$foreground 55%"))
        with VerticalScroll(id="help") as box:
            box.border_title = "keys"
            box.border_subtitle = "Esc closes"
            yield Static(Content.assemble(*lines))
