"""The screen as it is kept in pictures: every state, three sizes, dark, light, ANSI colours and none.

FERRUM_SNAPSHOTS=write keeps it as it is now: look at each picture before it is committed.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from ferrum_mlx import hub
from ferrum_mlx.chat import store as chat_store
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.settings import Settings
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError
from ferrum_tui import message
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Failure
from ferrum_tui.screens import listing, models, settings
from ferrum_tui.screens import sessions as sessions_screen

from . import scenes
from .driver import GREEDY, answers, screen, state, type_in, until
from .picture import KEPT, WRITE, calm, check, difference, picture

DRAWN_WITH = {"textual": "8.2.8", "rich": "15.0.0"}  # another may draw a border otherwise
SIZES = [(120, 36), (80, 24), (40, 12)]
THEMES = {"light": "ferrum-light", "ansi": "ansi-dark"}  # at 80×24, the main state at every size
MOST_BYTES = 3_000_000
State = Callable[[Pilot[ChatApp], Any], Awaitable[None]]


class Download:
    """One that has stopped in the middle."""

    said, done, total, rate, rest_s = "from the hub", 1_500_000_000, 4_608_000_000, 48_200_000, 64.5
    error, stopping = None, False
    ended = SimpleNamespace(is_set=lambda: False)

    def __init__(self, model: str, *, backend: str) -> None:
        self.model = model

    def start(self) -> None: ...
    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def fixed(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always 14:02, with the same models and files; no program or variable of this machine counts."""
    seconds = count(int(scenes.NOW))
    clock = SimpleNamespace(
        localtime=lambda at=scenes.NOW: time.localtime(min(at, scenes.NOW)), strftime=time.strftime
    )
    monkeypatch.setattr(message, "time", clock)
    monkeypatch.setattr(sessions_screen, "time", clock)
    monkeypatch.setattr(chat_store, "time", SimpleNamespace(time=lambda: float(next(seconds))))
    monkeypatch.setattr(listing, "entries", lambda fit=None, backend="": scenes.models())
    monkeypatch.setattr(hub, "info", lambda name, backend: SimpleNamespace(name=name, path=None))
    monkeypatch.setattr(models, "Download", Download)
    monkeypatch.setattr(settings, "settings_file", lambda: Path("~/.config/ferrum-mlx/config.toml"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("notes.md", "new plan.txt", "nothing.py"):
        Path(name).write_text("buy milk\n")


@asynccontextmanager
async def opened(conversation: Conversation | None = None) -> AsyncIterator[Pilot[ChatApp]]:
    app = ChatApp(
        EngineConfig(backend="fake", model="Qwen/Qwen3-8B"),
        GREEDY,
        make_client=EngineClient.in_thread,
        store=Store(Path("sessions.db")),
        settings=Settings(),
        conversation=conversation,
    )
    app.animation_level = "none"
    async with app.run_test(size=SIZES[0]) as pilot:
        await scenes.with_readings(pilot)
        yield pilot


async def empty(pilot: Pilot[ChatApp], stage: Any) -> None:
    await until(pilot, lambda: "Ctrl+O chooses" in screen(pilot.app))


async def talked(pilot: Pilot[ChatApp], stage: Any) -> None:
    await pilot.app.open(scenes.conversation())
    pilot.app.desk.talk.status_line.status = scenes.DONE
    await until(pilot, lambda: "TTFT 412 ms" in screen(pilot.app))


async def streaming(pilot: Pilot[ChatApp], stage: Any) -> None:
    stage.answers["go on"] = (
        "Each full block has a **hash**:\n\n```python\nhash((parent, *tokens))\n# and so o"
    )
    stage.held = True
    await talked(pilot, stage)
    stage.allow(len(stage.answers["go on"]))
    await type_in(pilot, "go on")
    await pilot.press("enter")
    await until(pilot, lambda: answers(pilot)[-1].endswith("and so o"))
    turn = pilot.app.desk.talk.turn
    assert turn is not None
    turn._sent, turn._first, turn._at_first, turn._latest = 0.0, 0.412, 1, 2.5
    pilot.app.desk.show_status()
    await type_in(pilot, "a draft")


async def failed(pilot: Pilot[ChatApp], stage: Any) -> None:
    await talked(pilot, stage)
    stage.crash = EngineDiedError(
        "[METAL] Command buffer execution failed: Insufficient Memory", next_step="lower --kv-memory"
    )
    await type_in(pilot, "go on")
    await pilot.press("enter")
    await until(pilot, lambda: bool(pilot.app.query(Failure)) and stage.builds == 2)
    await until(pilot, lambda: state(pilot) == "ready")
    await scenes.with_readings(pilot)


async def compared(pilot: Pilot[ChatApp], stage: Any) -> None:
    await talked(pilot, stage)
    desk = pilot.app.desk
    await desk.compare(desk.talk.host, desk.talk.setup, "temperature=0.2", "temperature=1.5")
    right = desk.talks[1]
    right.leaf = 3
    await right.show()
    right.status_line.status = scenes.DONE


async def engine(pilot: Pilot[ChatApp], stage: Any) -> None:
    await pilot.press("ctrl+b")
    await until(pilot, lambda: "KV IN USE" in screen(pilot.app))


async def picking(pilot: Pilot[ChatApp], stage: Any) -> None:
    await pilot.press("ctrl+o")
    await until(pilot, lambda: "llama-3.3-70b" in screen(pilot.app))


async def downloading(pilot: Pilot[ChatApp], stage: Any) -> None:
    await picking(pilot, stage)
    await pilot.press("down", "down", "enter")
    await until(pilot, lambda: "48.2 MB/s" in screen(pilot.app))


async def asking(pilot: Pilot[ChatApp], stage: Any) -> None:
    await picking(pilot, stage)
    await pilot.press("home", "d")
    await until(pilot, lambda: "become free" in screen(pilot.app))


async def sessions(pilot: Pilot[ChatApp], stage: Any) -> None:
    store = pilot.app.store
    assert store is not None
    await pilot.app.open(store.load(scenes.sessions(store)))
    pilot.app.desk.talk.status_line.status = scenes.DONE
    await pilot.press("ctrl+s")
    await until(pilot, lambda: "3 sessions" in screen(pilot.app))


async def set_up(pilot: Pilot[ChatApp], stage: Any) -> None:
    await pilot.press("f2")
    await until(pilot, lambda: "temperature" in screen(pilot.app))


async def helped(pilot: Pilot[ChatApp], stage: Any) -> None:
    await pilot.press("f1")
    await until(pilot, lambda: "Esc closes" in screen(pilot.app))


async def files(pilot: Pilot[ChatApp], stage: Any) -> None:
    await talked(pilot, stage)
    await type_in(pilot, "see @n")
    await until(pilot, lambda: "nothing.py" in screen(pilot.app))


async def typing(pilot: Pilot[ChatApp], stage: Any) -> None:
    await talked(pilot, stage)
    await type_in(pilot, "/")
    await until(pilot, lambda: "Tab takes it" in screen(pilot.app))


STATES: dict[str, State] = {
    "empty": empty,
    "conversation": talked,
    "streaming": streaming,
    "failure": failed,
    "comparison": compared,
    "engine": engine,
    "models": picking,
    "download": downloading,
    "confirm": asking,
    "sessions": sessions,
    "settings": set_up,
    "help": helped,
    "files": files,
    "commands": typing,
}
MAIN = "conversation"
ANSI_LIGHT = (MAIN, "failure", "engine", "models")
COLOURLESS = (
    *("conversation", "failure", "engine", "models", "empty", "comparison"),
    *("download", "confirm", "sessions", "settings"),
)
Kept = tuple[str, tuple[int, int], str]  # name of a picture, size, theme


def kept(name: str) -> list[Kept]:
    """The pictures of a state in colour."""
    found = [(f"{name}-{width}x{height}", (width, height), "ferrum") for width, height in SIZES]
    for kind, theme in THEMES.items():
        found += variants(name, kind, theme)
    if name in ANSI_LIGHT:
        found.append((f"{name}-ansi-light", (80, 24), "ansi-light"))
    return found


def variants(name: str, kind: str, theme: str) -> list[Kept]:
    found = [(f"{name}-{kind}", (80, 24), theme)]
    if name == MAIN:
        found += [
            (f"{name}-{kind}-{width}x{height}", (width, height), theme)
            for width, height in SIZES
            if (width, height) != (80, 24)
        ]
    return found


def skip_if_drawn_otherwise() -> None:
    """The test extra has those that draw them, test_the_versions_that_draw_are_installed sees to it."""
    now = {name: version(name) for name in DRAWN_WITH}
    if now != DRAWN_WITH and not WRITE:
        pytest.skip(
            f"THE SCREEN'S PICTURES ARE NOT COMPARED: they were drawn with {DRAWN_WITH}, this is {now}; "
            "pip install -e '.[test]' takes the former"
        )


@pytest.mark.parametrize("name", STATES)
async def test_looks_as_it_is_kept(name: str, stage: Any) -> None:
    async with opened() as pilot:
        await STATES[name](pilot, stage)
        scenes.still(pilot)
        for picture_name, size, theme in kept(name):
            pilot.app.theme = theme
            await pilot.resize_terminal(*size)
            skip_if_drawn_otherwise()  # that it can be drawn has been seen
            await check(pilot, picture_name)


@pytest.mark.parametrize("name", COLOURLESS)
async def test_looks_as_it_is_kept_without_colour(
    name: str, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened() as pilot:
        await STATES[name](pilot, stage)
        scenes.still(pilot)
        for picture_name, size, _ in variants(name, "nocolor", ""):
            await pilot.resize_terminal(*size)
            skip_if_drawn_otherwise()
            await check(pilot, picture_name)
            drawn = set(re.findall(r"#\w{6}", picture(pilot.app)))
            assert all(colour[1:3] == colour[3:5] == colour[5:7] for colour in drawn)


def test_the_versions_that_draw_are_installed() -> None:
    """A newer one would take the comparison away; so the extra names them exactly, the package itself not."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pins = dict(each.split("==") for each in project["optional-dependencies"]["test"] if "==" in each)
    assert pins == DRAWN_WITH


async def test_another_label_or_colour_is_seen(stage: Any) -> None:
    async with opened() as pilot:
        await empty(pilot, stage)
        scenes.still(pilot)
        before = await calm(pilot)
        pilot.app.prompt.border_title = "promt"
        label = await calm(pilot)
        pilot.app.prompt.styles.border = ("round", "#123456")
        assert "> promt <" in difference(before, label)
        assert "#123456" in difference(label, await calm(pilot))
        assert difference(label, label) == ""


def test_the_kept_pictures_are_these_and_small() -> None:
    names = {name for state in STATES for name, _, _ in kept(state)}
    files = {file.stem: file.stat().st_size for file in KEPT.glob("*.svg") if ".actual" not in file.name}
    names |= {picture_name for name in COLOURLESS for picture_name, *_ in variants(name, "nocolor", "")}
    assert set(files) == names
    assert sum(files.values()) < MOST_BYTES
