"""Help shows the keys as they are bound now, and the commands there are."""

from __future__ import annotations

from typing import ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from ferrum_mlx.chat.commands import COMMANDS
from ferrum_tui.app import ChatApp
from ferrum_tui.completions import Completions
from ferrum_tui.prompt import Prompt
from ferrum_tui.screens.help import HelpScreen

from .driver import ready
from .screen_host import CSS


class Answerlike(Static, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy the answer", id="answer.copy")]


class Chatlike(App[None]):
    CSS_PATH = CSS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "regenerate", "Answer again", id="chat.regenerate"),
        Binding("ctrl+n", "new", "New chat", id="chat.new", priority=True),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "new" or len(self.screen_stack) == 1  # off below another screen, as in the chat

    def compose(self) -> ComposeResult:
        yield Answerlike("x")
        yield Prompt(Completions())

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()


def text(app: App[None]) -> str:
    return str(app.screen.query_one("#help Static", Static).content)


async def test_keys_of_the_app_the_focus_and_other_widgets() -> None:
    app = Chatlike()
    async with app.run_test(size=(120, 60)) as pilot:
        app.push_screen(HelpScreen())
        await pilot.pause()
        lines = [line.split(maxsplit=1) for line in text(app).splitlines()]
        assert ["^r", "Answer again"] in lines
        assert ["^n", "New chat"] in lines
        assert ["y", "Copy the answer"] in lines
        assert any(line[-1:] == ["Send"] for line in lines)
        assert [line[0] for line in lines if len(line) == 1][:1] == ["prompt"]
        for command in COMMANDS:
            assert f"/{command.name}" in text(app)
        assert "/theme [NAME]" in text(app)


async def test_remapped_keys() -> None:
    keymap = {"chat.regenerate": "f9", "answer.copy": "f8", "prompt.send": "ctrl+s"}
    app = Chatlike()
    async with app.run_test(size=(120, 60)) as pilot:
        app.set_keymap(keymap)
        app.push_screen(HelpScreen(keymap))
        await pilot.pause()
        lines = [line.split(maxsplit=1) for line in text(app).splitlines()]
        assert ["f9", "Answer again"] in lines
        assert ["f8", "Copy the answer"] in lines
        assert ["^s", "Send"] in lines
        assert ["^r", "Answer again"] not in lines
        assert ["y", "Copy the answer"] not in lines


@pytest.mark.parametrize(
    ("keymap", "line"),
    [
        ({}, ["esc", "Stop, or to the prompt"]),
        ({"chat.stop": "f8", "chat.prompt": "f9"}, ["f9", "To the prompt"]),
    ],
)
async def test_a_key_has_one_line_in_its_group(app: ChatApp, keymap: dict[str, str], line: list[str]) -> None:
    async with app.run_test(size=(120, 60)) as pilot:
        await ready(pilot)
        app.set_keymap(keymap)
        app.push_screen(HelpScreen(keymap))
        await pilot.pause()
        lines = [line.split(maxsplit=1) for line in text(app).splitlines()]
        of_chat = lines[lines.index(["chat"]) :]
        of_chat = of_chat[: of_chat.index([])]
        assert line in of_chat
        keys = [line[0] for line in of_chat]
        assert len(set(keys)) == len(keys) > 10


@pytest.mark.parametrize("key", ["escape", "f1", "q", "enter"])
async def test_it_scrolls_on_a_small_screen_and_closes(key: str) -> None:
    app = Chatlike()
    async with app.run_test(size=(40, 12)) as pilot:
        app.push_screen(HelpScreen())
        await pilot.pause()
        box = app.screen.query_one("#help")
        await pilot.press("pagedown")
        await pilot.pause()
        assert box.scroll_offset.y > 0
        await pilot.press(key)
        assert not isinstance(app.screen, HelpScreen)
