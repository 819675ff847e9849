"""What keys do, where no other file has it: picking a model or a session, the palette, the editor, copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui import prompt as prompt_module
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Welcome
from ferrum_tui.screens import listing
from ferrum_tui.screens.finder import SearchBox
from ferrum_tui.screens.models import ModelPicker
from ferrum_tui.screens.sessions import SessionsScreen

from . import scenes
from .conversing import SIZE, ask, mounted
from .driver import GREEDY, prompt, ready, screen, type_in, until


@pytest.fixture
def chat(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatApp:
    monkeypatch.setenv("SSH_TTY", "x")  # no clipboard of this machine
    store = Store(tmp_path / "sessions.db")
    return ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, store=store)


async def test_ctrl_o_goes_on_with_the_model_that_is_chosen(
    chat: ChatApp, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = next(entry for entry in scenes.models() if entry.here)
    monkeypatch.setattr(listing, "entries", lambda fit=None, backend="": [there])
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        before = chat.host
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(chat.screen, ModelPicker) and there.name in screen(chat))
        await pilot.press("enter")
        await until(pilot, lambda: chat.host is not before and chat.host.state == "ready")
        assert chat.host.config.model == there.name
        await ask(pilot, "b")
        assert stage.seen == ["\0a", "\0a\0ok\0b"]


async def test_ctrl_s_goes_on_with_the_session_that_is_chosen(chat: ChatApp) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await pilot.press("ctrl+n")
        assert chat.query(Welcome)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(chat.screen, SessionsScreen) and "1 session" in screen(chat))
        await pilot.press("enter")
        await until(pilot, lambda: mounted(chat) == ["a", "ok"])


async def test_ctrl_p_finds_and_runs_a_command(chat: ChatApp) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(chat.focused, Input))
        await type_in(pilot, "new chat")
        await until(pilot, lambda: "Begin another conversation" in screen(chat))
        await pilot.press("enter")
        await until(pilot, lambda: bool(chat.query(Welcome)))
        assert chat.screen is chat.screen_stack[0]


async def test_ctrl_g_brings_what_the_editor_made_of_the_draft(
    chat: ChatApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = []

    @contextmanager
    def suspend() -> Iterator[None]:  # there is no terminal to hand over
        asleep.append(True)
        yield
        asleep.append(False)

    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i.bak "s/$/ [and more]/" "$1"\n')
    editor.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await type_in(pilot, "draft")
        with monkeypatch.context() as patch:
            patch.setattr(chat, "suspend", suspend)
            await pilot.press("ctrl+g")
            assert asleep == [True, False]
        assert prompt(pilot) == "draft [and more]"
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "no editor" in screen(chat))
        assert prompt(pilot) == "draft [and more]"


@pytest.mark.parametrize("key", ["ctrl+s", "f2"])
async def test_ctrl_c_copies_what_is_selected_in_a_box_of_another_screen(chat: ChatApp, key: str) -> None:
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await pilot.press(key)
        await until(pilot, lambda: len(chat.screen_stack) == 2)
        box = chat.screen.query(SearchBox if key == "ctrl+s" else Input).first()
        assert isinstance(box, Input)
        box.value = "1.5"
        box.focus()
        await until(pilot, lambda: chat.focused is box)
        box.select_all()
        await pilot.press("ctrl+c")
        assert chat.clipboard == "1.5"
        await until(pilot, lambda: "sent to the terminal" in screen(chat))
        assert "again quits" not in screen(chat)
        await pilot.press("end", "ctrl+c")
        await until(pilot, lambda: "again quits" in screen(chat))


async def test_no_control_code_of_a_notice_reaches_the_screen(
    chat: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise prompt_module.click.ClickException("\x1b]0;mine\x07 [/x]")

    monkeypatch.setattr(prompt_module.click, "edit", broken)
    monkeypatch.setattr(chat, "suspend", nullcontext)
    async with chat.run_test(size=(150, 40), notifications=True) as pilot:
        await ready(pilot)
        chat.tell("a\x1b[2Jb\x07c\x9bd [/x]")
        await until(pilot, lambda: "a[2Jbcd [/x]" in screen(chat))
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "no editor: ]0;mine [/x]" in screen(chat))
        assert not any(code in screen(chat) for code in "\x1b\x07\x9b")


async def test_a_file_with_a_blank_of_any_kind_in_its_name_is_put_in_quotes(
    chat: ChatApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zz\u2003plan.txt").touch()
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await type_in(pilot, "@zz")
        await until(pilot, lambda: "Tab takes it" in screen(chat))
        await pilot.press("tab")
        assert prompt(pilot) == '@"zz\u2003plan.txt" '
