"""Every key of every widget and screen reaches its action, where it is meant to; what the actions do has
tests of its own, by screen. A class that binds keys and has no place here fails."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.binding import Binding, BindingsMap
from textual.dom import DOMNode
from textual.pilot import Pilot
from textual.screen import Screen

import ferrum_tui
from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.chat.settings import Settings
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui import keys
from ferrum_tui.app import ChatApp
from ferrum_tui.block import CodeBlock
from ferrum_tui.engine.screen import EngineScreen
from ferrum_tui.message import MessageWidget
from ferrum_tui.notices import Remark
from ferrum_tui.prompt import Prompt
from ferrum_tui.screens import listing
from ferrum_tui.screens.confirm import Confirm
from ferrum_tui.screens.finder import SearchBox
from ferrum_tui.screens.help import HelpScreen
from ferrum_tui.screens.models import ModelPicker
from ferrum_tui.screens.sessions import SessionsScreen
from ferrum_tui.screens.settings import SettingsScreen, Setup

from . import scenes
from .driver import GREEDY, ready, screen, until

PROMISED = {  # what people expect of a chat in a terminal
    "prompt.send": {"enter"},
    "prompt.newline": {"shift+enter", "ctrl+j", "alt+enter"},
    "prompt.eof": {"ctrl+d"},
    "prompt.editor": {"ctrl+g"},
    "prompt.end": {"end"},
    "chat.stop": {"escape"},
    "chat.interrupt": {"ctrl+c"},
    "chat.up": {"pageup"},
    "chat.down": {"pagedown"},
    "chat.new": {"ctrl+n"},
    "chat.model": {"ctrl+o"},
    "chat.sessions": {"ctrl+s"},
    "chat.regenerate": {"ctrl+r"},
    "chat.engine": {"ctrl+b"},
    "chat.help": {"f1"},
    "code.copy": {"y", "enter"},
}
ENTER_AND_TAB = {"ctrl+m", "ctrl+i"}  # to a terminal


def classes() -> Iterator[type[DOMNode]]:
    """Those of the chat that bind keys; test_bench_app.py has the benchmark's."""
    for found in pkgutil.walk_packages(ferrum_tui.__path__, "ferrum_tui."):
        if not found.name.startswith(
            ("ferrum_tui.bench", "ferrum_tui.measure", "ferrum_tui.flushes", "ferrum_tui.trial")
        ):
            for each in vars(importlib.import_module(found.name)).values():
                own = isinstance(each, type) and each.__module__ == found.name
                if own and issubclass(each, DOMNode) and "BINDINGS" in vars(each):
                    yield each


def bindings(cls: type[DOMNode]) -> list[Binding]:
    """One a key."""
    return [binding for _, binding in BindingsMap(vars(cls)["BINDINGS"])]


async def at_the_chat(pilot: Pilot[ChatApp], binding: Binding) -> None:
    editing = Message(id=1, parent=None, role="user") if binding.action == "stop" else None
    pilot.app.desk.talk.editing = editing
    pilot.app.set_focus(None if binding.action == "to_prompt" else pilot.app.prompt)


async def at_a_message(pilot: Pilot[ChatApp], binding: Binding) -> None:
    """At one that has something to be done about it."""
    if not pilot.app.query(MessageWidget):
        await pilot.app.open(scenes.conversation())
        pilot.app.desk.talk.path[1].ending = "length"
    messages = list(pilot.app.query(MessageWidget))
    messages[0 if binding.action == "edit" else 1].focus()


async def at_code(pilot: Pilot[ChatApp], binding: Binding) -> None:
    await at_a_message(pilot, binding)
    await until(pilot, lambda: bool(pilot.app.query(CodeBlock)))
    pilot.app.query(CodeBlock).first().focus()


def on(make: Callable[[ChatApp], Screen[Any]]) -> Callable[[Pilot[ChatApp], Binding], Awaitable[None]]:
    async def place(pilot: Pilot[ChatApp], binding: Binding) -> None:
        if len(pilot.app.screen_stack) == 1:
            await pilot.app.push_screen(make(pilot.app))

    return place


async def at_the_models(pilot: Pilot[ChatApp], binding: Binding) -> None:
    await on(lambda app: ModelPicker())(pilot, binding)
    await until(pilot, lambda: "qwen3-8b" in screen(pilot.app))
    picker = pilot.app.screen
    assert isinstance(picker, ModelPicker)
    wanted: Any = SimpleNamespace(stop=lambda: None) if binding.action == "cancel" else None
    picker._download = wanted


async def at_the_sessions(pilot: Pilot[ChatApp], binding: Binding) -> None:
    store = pilot.app.store
    assert store is not None
    if len(pilot.app.screen_stack) == 1:
        scenes.sessions(store)
    await on(lambda app: SessionsScreen(store))(pilot, binding)
    sessions = pilot.app.screen
    assert isinstance(sessions, SessionsScreen)
    await until(pilot, lambda: len(sessions._rows) == 3)
    sessions._deleted = sessions._rows[:1]


async def at_the_search(pilot: Pilot[ChatApp], binding: Binding) -> None:
    await at_the_models(pilot, binding)
    pilot.app.screen.query_one(SearchBox).focus()


PLACES: dict[type[DOMNode], Callable[[Pilot[ChatApp], Binding], Awaitable[None]]] = {
    ChatApp: at_the_chat,
    Prompt: at_the_chat,
    MessageWidget: at_a_message,
    CodeBlock: at_code,
    HelpScreen: on(lambda app: HelpScreen()),
    EngineScreen: on(lambda app: EngineScreen(app.feed)),
    ModelPicker: at_the_models,
    SearchBox: at_the_search,
    SessionsScreen: at_the_sessions,
    SettingsScreen: on(lambda app: SettingsScreen(Setup())),
    Confirm: on(lambda app: Confirm("Really?", "Yes")),
}


@pytest.fixture
def chat(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatApp:
    monkeypatch.setattr(listing, "entries", lambda fit=None, backend="": scenes.models())
    store = Store(tmp_path / "sessions.db")
    return ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, store=store)


def recorded(app: ChatApp, monkeypatch: pytest.MonkeyPatch) -> list[tuple[DOMNode, str]]:
    """Where an action would have gone, and its name; nothing is done."""
    asked: list[tuple[DOMNode, str]] = []

    async def dispatch(namespace: DOMNode, name: str, parameters: Any) -> bool:
        asked.append((namespace, name))
        return True

    monkeypatch.setattr(app, "_dispatch_action", dispatch)
    return asked


@pytest.mark.parametrize("cls", PLACES, ids=lambda cls: cls.__name__)
async def test_every_key_reaches_its_action(
    cls: type[DOMNode], chat: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recorded(chat, monkeypatch)
    async with chat.run_test(size=(100, 30)) as pilot:
        await ready(pilot)
        for binding in bindings(cls):
            await PLACES[cls](pilot, binding)
            await pilot.pause()
            asked.clear()
            await pilot.press(binding.key)
            await pilot.pause()
            names = [name for _, name in asked]
            assert names == [binding.action.partition("(")[0].removeprefix("app.")], binding
            owner = ChatApp if binding.action.startswith("app.") else cls
            assert isinstance(asked[0][0], owner), binding


async def test_esc_says_what_it_does(chat: ChatApp, stage: Any) -> None:
    stage.held = True

    def said() -> str:
        active = chat.screen.active_bindings.get("escape")
        return active.binding.description if active is not None else ""

    async with chat.run_test(size=(100, 30)) as pilot:
        await ready(pilot)
        assert said() == ""
        await pilot.press("a", "enter")
        await until(pilot, lambda: "esc Stop" in screen(chat))
        assert said() == "Stop"
        stage.release()
        await until(pilot, lambda: not chat.desk.answering)
        await until(pilot, lambda: "esc Stop" not in screen(chat))
        await pilot.press("shift+tab")
        await until(pilot, lambda: "esc To the prompt" in screen(chat))
        await pilot.press("escape")
        assert chat.prompt.has_focus


def test_every_class_that_binds_keys_is_here() -> None:
    assert set(classes()) == set(PLACES)


def test_the_keys_that_people_expect() -> None:
    found: dict[str | None, set[str]] = {}
    for cls in classes():
        for binding in bindings(cls):
            found.setdefault(binding.id, set()).add(binding.key)
    assert {name: found.get(name) for name in PROMISED} == PROMISED
    assert not ENTER_AND_TAB & {key for bound in found.values() for key in bound}


def table_of_keys() -> str:
    """As README has it: the ids of each group with the keys they have."""
    found: dict[str, dict[str, list[str]]] = {}
    for cls in classes():
        for binding in bindings(cls):
            if binding.id is not None:
                group, _, name = binding.id.partition(".")
                found.setdefault(group, {}).setdefault(name, []).append(f"`{binding.key}`")
    rows = [
        f"| `{group}.` | " + ", ".join(f"{name}: {' '.join(own)}" for name, own in names.items()) + " |"
        for group, names in sorted(found.items())
    ]
    return "\n".join(["| | ids, and their keys |", "|---|---|", *rows])


def test_every_id_is_in_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"<!-- keys -->\n{table_of_keys()}\n<!-- /keys -->" in readme
    assert {binding.id for cls in classes() for binding in bindings(cls) if binding.id} == keys.ids()


@pytest.mark.parametrize(
    ("entry", "good", "note"),
    [
        ({"chat.hlep": "f9"}, {}, "'chat.hlep' names no key; did you mean chat.help?; allowed: chat.down"),
        ({"nothing": "f9"}, {}, "allowed: chat.…, code.…, confirm.…"),
        (
            {"chat.help": "nokeyatall"},
            {},
            "chat.help: there is no key 'nokeyatall'; allowed: a character, f1",
        ),
        ({"chat.help": "f9, hyperspace+x,ctrl+F"}, {"chat.help": "f9,ctrl+f"}, "no key 'hyperspace+x'"),
        ({"chat.help": "f25"}, {}, "no key 'f25'"),
        ({"chat.help": "F9"}, {}, "no key 'F9'"),
        ({"chat.help": "?,/,ctrl++,+"}, {"chat.help": "question_mark,slash,ctrl+plus,plus"}, ""),
        ({"message.next": "é,alt+shift+pagedown,漢"}, {"message.next": "é,alt+shift+pagedown,漢"}, ""),
    ],
)
def test_keys_that_cannot_be_are_told(entry: dict[str, str], good: dict[str, str], note: str) -> None:
    usable, notes = keys.usable(entry)
    assert usable == good
    assert (note in notes[0] and len(notes) == 1) if note else not notes


def test_each_of_our_own_keys_could_be_given() -> None:
    for cls in classes():
        for binding in bindings(cls):
            if binding.id is not None:
                assert keys.usable({binding.id: binding.key}) == ({binding.id: binding.key}, [])


async def test_a_key_that_cannot_be_leaves_ours_and_is_noted(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(keys={"chat.hlep": "f9", "chat.help": "nokeyatall", "chat.new": "?"})
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, settings=settings)
    asked = recorded(app, monkeypatch)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot)
        noted = " ".join(str(remark.content) for remark in app.query(Remark))
        assert "did you mean chat.help?" in noted
        assert "no key 'nokeyatall'" in noted
        await pilot.press("f1", "question_mark")
        await pilot.pause()
        assert [name for _, name in asked] == ["help", "new_chat"]


async def test_a_key_of_the_settings_file_takes_the_place_of_ours(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(keys={"chat.help": "f9", "prompt.send": "ctrl+y"})
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, settings=settings)
    asked = recorded(app, monkeypatch)
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("f1", "f9", "ctrl+y")
        await pilot.pause()
        assert [name for _, name in asked] == ["help", "send"]
