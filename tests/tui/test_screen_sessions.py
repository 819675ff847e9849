"""The list of sessions over a real store: finding, resuming, renaming, deleting, exporting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
from ferrum_tui.screens.finder import SearchBox
from ferrum_tui.screens.sessions import SessionsScreen

from .driver import screen, until
from .screen_host import LOOKS, NOTHING, Host, note


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "sessions.db")
    yield store
    store.close()


def keep(store: Store, prompt: str, answer: str = "an answer") -> int:
    conversation = Conversation()
    asked = conversation.add("user", prompt, parent=None)
    told = conversation.add("assistant", answer, parent=asked.id)
    told.model, told.ending = "smollm2-135m", "stop"
    conversation.leaf = told.id
    store.keep(conversation)
    assert conversation.id is not None
    return conversation.id


def titles(app: Host) -> list[str]:
    rows = app.screen.query_one(OptionList).options
    return [str(row.prompt).strip("● ").split("  ")[0] for row in rows]


async def test_no_sessions_yet(store: Store) -> None:
    app = Host(SessionsScreen(store))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "no sessions yet" in screen(app))
        await pilot.press("r", "d", "u", "x", "enter")
        assert app.result is NOTHING
        await pilot.press("escape")
    assert app.result is None


@pytest.mark.parametrize(("size", "theme"), LOOKS)
async def test_newest_first_and_enter_resumes(size: tuple[int, int], theme: str, store: Store) -> None:
    first, second = keep(store, "first [/x] 漢字"), keep(store, "second \x1b[31mred")
    app = Host(SessionsScreen(store, current=store.load(second)), theme)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: titles(app) == ["second [31mred", "first [/x] 漢字"])
        assert "first [/x] 漢字" in screen(app)
        assert "● " in next(line for line in screen(app).splitlines() if "second" in line)
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == first


async def test_searching_while_typing(store: Store) -> None:
    wanted = keep(store, "about trees", "The birch is a tree with white bark.")
    keep(store, "about cars")
    app = Host(SessionsScreen(store))
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("slash", *"BIRCH")
        await until(pilot, lambda: titles(app) == ["about trees"])
        assert "The birch is a tree" in screen(app)
        await pilot.press("x")
        await until(pilot, lambda: "no session has all these words" in note(pilot))
        await pilot.press("backspace", "enter")  # asks at once, not after the pause
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == wanted


async def test_renaming(store: Store) -> None:
    session = keep(store, "old")
    app = Host(SessionsScreen(store))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("r")
        assert app.screen.query_one("#name", Input).value == "old"
        await pilot.press("ctrl+u", "enter")
        await until(pilot, lambda: "at least one letter" in note(pilot))
        await pilot.press(*"new", "escape")
        assert store.list()[0].title == "old"
        await pilot.press("r", "ctrl+u", *"[/x] d", "enter")
        await until(pilot, lambda: titles(app) == ["[/x] d"])
        assert app.screen.query_one(OptionList).has_focus
    assert store.list()[0].title == "[/x] d"
    assert store.list()[0].id == session


async def test_deleting_and_undoing(store: Store) -> None:
    ids = [keep(store, f"session {i}") for i in range(3)]
    app = Host(SessionsScreen(store, current=store.load(ids[0])))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("home", "down", "d")
        await until(pilot, lambda: titles(app) == ["session 2", "session 0"])
        await pilot.press("d")  # the row below is highlighted, and it is the session in hand
        await until(pilot, lambda: "session in hand" in note(pilot))
        await pilot.press("home", "d")
        await until(pilot, lambda: titles(app) == ["session 0"])
        assert [row.id for row in store.list()] == [ids[0]]
        await pilot.press("u", "u")
        await until(pilot, lambda: titles(app) == ["session 2", "session 1", "session 0"])
        await pilot.press("u")
    assert [row.id for row in store.list()] == ids[::-1]


async def test_exporting(store: Store, tmp_path: Path) -> None:
    keep(store, "Trees and cars", "An *answer*.")
    app = Host(SessionsScreen(store))
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("x", "enter")
        await until(pilot, lambda: note(pilot) == f"written: {tmp_path / 'trees-and-cars.md'}")
        assert "An *answer*." in (tmp_path / "trees-and-cars.md").read_text()
        await pilot.press("x", *"all.json", "enter")
        await until(pilot, lambda: (tmp_path / "all.json").exists())
        await pilot.press("x", *"all.txt", "enter")
        await until(pilot, lambda: "ends in '.txt'" in note(pilot))
        await pilot.press("escape")
        assert app.result is NOTHING
        await pilot.press("escape")
    assert app.result is None


async def test_the_session_in_hand_is_renamed_and_exported_as_it_is(store: Store, tmp_path: Path) -> None:
    current = store.load(keep(store, "old"))
    current.add("user", "not kept yet", parent=current.leaf)
    current.leaf = 3
    app = Host(SessionsScreen(store, current))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("r", "ctrl+u", *"new", "enter")
        await until(pilot, lambda: titles(app) == ["new"])
        await pilot.press("x", *"c.md", "enter")
        await until(pilot, lambda: "written" in note(pilot))
    assert current.title == "new"
    assert "not kept yet" in (tmp_path / "c.md").read_text()


async def test_a_thousand_sessions(store: Store) -> None:
    for i in range(1000):
        keep(store, f"session {i}")
    app = Host(SessionsScreen(store))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "1,000 sessions" in note(pilot))
        await pilot.press("end")
        await until(pilot, lambda: "session 0 " in screen(app))
        app.screen.query_one(SearchBox).value = "session 77"
        await until(pilot, lambda: len(titles(app)) == 19)
