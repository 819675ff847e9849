"""What the commands on kept conversations do on the screen, over a real store; and /theme and /system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Welcome
from ferrum_tui.prompt import Prompt
from ferrum_tui.screens.finder import SearchBox
from ferrum_tui.screens.sessions import SessionsScreen

from .conversing import SIZE, ask, mounted
from .driver import GREEDY, prompt, ready, screen, until


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path / "sessions.db")


@pytest.fixture
def chat(stage: Any, store: Store) -> ChatApp:
    return ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, store=store)


async def sent(pilot: Pilot[ChatApp], command: str, told: str) -> None:
    """A command, and what is told of it."""
    await ask(pilot, command)
    await until(pilot, lambda: told in screen(pilot.app))


def keep(store: Store, prompt: str) -> int:
    conversation = Conversation()
    asked = conversation.add("user", prompt, parent=None)
    conversation.leaf = conversation.add("assistant", f"about {prompt}", parent=asked.id).id
    store.keep(conversation)
    assert conversation.id is not None
    return conversation.id


async def test_resume_goes_on_with_another_session(chat: ChatApp, stage: Any, store: Store) -> None:
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await sent(pilot, "/resume", "no other session")
        assert prompt(pilot) == "/resume"
        first, second = keep(store, "trees"), keep(store, "cars")
        await ask(pilot, "mine")
        await ask(pilot, "/resume")  # the one written to last is in hand already
        assert mounted(chat) == ["cars", "about cars"]
        await ask(pilot, "more")
        await ask(pilot, f"/resume {first}")
        assert mounted(chat) == ["trees", "about trees"]
        assert stage.seen == ["\0mine", "\0cars\0about cars\0more"]
        await sent(pilot, "/resume 77", "session 77 is not there")
        assert [message.text for message in store.load(second).messages.values()][2:] == ["more", "ok"]


async def test_delete_takes_the_session_in_hand_or_another(chat: ChatApp, store: Store) -> None:
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await sent(pilot, "/delete", "not kept yet")
        other = keep(store, "trees")
        await ask(pilot, "mine")
        number = chat.desk.talk.book.conversation.id
        await sent(pilot, f"/delete {other}", f"Session {other} is deleted")
        assert mounted(chat) == ["mine", "ok"]
        await sent(pilot, "/delete", f"Session {number} is deleted")
        assert chat.query(Welcome)
        assert store.list() == []


async def test_delete_where_nothing_is_kept_leaves_the_chat_as_it_is(
    chat: ChatApp, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FerrumError("the disk is full")

    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await ask(pilot, "kept")
        monkeypatch.setattr(store, "save", full)
        await ask(pilot, "not kept")
        await until(pilot, lambda: "no longer kept: the disk is full" in screen(chat))
        await sent(pilot, "/delete", "conversations are not kept")
        assert mounted(chat) == ["kept", "ok", "not kept", "ok"]


async def test_export_takes_a_name_in_quotes_or_none(chat: ChatApp, tmp_path: Path) -> None:
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await ask(pilot, "Trees and cars")
        for command, name in (
            ("/export", "trees-and-cars.md"),
            ('/export "my file.md"', "my file.md"),
            ("/export other file.json", "other file.json"),
        ):
            await sent(pilot, command, f"Written to {name}")
            assert "Trees and cars" in (tmp_path / name).read_text()
        await sent(pilot, "/export all.txt", "ends in '.txt'")


async def test_sessions_opens_the_list_with_its_words(chat: ChatApp, store: Store) -> None:
    first = keep(store, "trees")
    keep(store, "cars")
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        chat.prompt.put("/sessions TREE")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(chat.screen, SessionsScreen) and "1 session" in screen(chat))
        assert chat.screen.query_one(SearchBox).value == "TREE"
        await pilot.press("enter")
        await until(pilot, lambda: mounted(chat) == ["trees", "about trees"])
        assert chat.desk.talk.book.conversation.id == first


async def test_rename_is_kept_and_shown(chat: ChatApp, store: Store) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "mine")
        await ask(pilot, "/rename Something else")
        assert store.list()[0].title == "Something else"
        assert "Something else" in screen(chat).splitlines()[0]


async def test_theme_by_name(chat: ChatApp) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        before = str(chat.screen.styles.background.hex)
        await ask(pilot, "/theme ferrum-light")
        assert chat.theme == "ferrum-light"
        await until(pilot, lambda: str(chat.screen.styles.background.hex) != before)


async def test_none_takes_the_system_message_away(chat: ChatApp, stage: Any, store: Store) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        for text, seen in (("be brief", "\0be brief\0a"), ("None", "\0a")):
            await ask(pilot, f"/system {text}")
            await ask(pilot, "a")
            await pilot.press("ctrl+n")
            assert stage.seen[-1] == seen
        latest = store.latest()
        assert latest is not None
        assert store.load(latest).system == ""


async def test_copy_takes_what_there_is(chat: ChatApp, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_TTY", "x")
    stage.answers["a"] = "Indented:\n\n    x = 1\n"
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "/copy code")
        assert chat.clipboard == "x = 1\n"
        stage.held = True
        chat.query_one(Prompt).put("b")
        await pilot.press("enter")
        await until(pilot, lambda: chat.desk.answering)
        chat.query_one(Prompt).put("/copy")
        await pilot.press("enter")
        await until(pilot, lambda: chat.clipboard == stage.answers["a"])  # the last there is
        stage.release()
