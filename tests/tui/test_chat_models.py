"""The model of a chat: asked for by name, fetched where it is not here, refused where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from ferrum_mlx import hub
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, ModelFileError
from ferrum_mlx.messages import Died
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Failure
from ferrum_tui.screens.models import ModelPicker

from ..conftest import tiny_safetensors
from .conversing import ask
from .driver import GREEDY, answers, prompt, ready, screen, state, until
from .screen_host import note
from .slow_hub import SlowHub

REPO = "tiny/model"


@pytest.fixture
def chat(stage: Any, tmp_path: Path) -> ChatApp:
    """With a file of the user's own as its model, so far as anybody looks; the engine is scripted."""
    return new_chat(own_model(tmp_path))


def own_model(folder: Path) -> str:
    path = folder / "own.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def folder_of(parent: Path, name: str, config: str = '{"model_type": "llama"}') -> str:
    """A sound folder, as far as can be seen without loading it; or one with another config."""
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(tiny_safetensors(10_000))
    return str(folder)


def new_chat(model: str, **config: Any) -> ChatApp:
    return ChatApp(
        EngineConfig(backend="mlx", model=model, **config), GREEDY, make_client=EngineClient.in_thread
    )


async def type_command(pilot: Any, text: str) -> None:
    pilot.app.prompt.put(text)
    await pilot.press("enter")


@pytest.mark.parametrize(
    ("command", "name", "offline", "why"),
    [
        ("/model", "qwen3-06b", False, "there is no model 'qwen3-06b' (did you mean qwen3-0.6b?)"),
        ("/model", "./no.gguf", False, "there is no file or folder no.gguf"),
        ("/compare", "qwen3-0.6b", True, "qwen3-0.6b is not on this machine, and --offline forbids"),
    ],
)
async def test_a_model_that_cannot_be_leaves_the_working_one_alone(
    command: str, name: str, offline: bool, why: str, stage: Any, tmp_path: Path, private_cache: Path
) -> None:
    app = new_chat(own_model(tmp_path), offline=offline)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        client = app.host.client
        await type_command(pilot, f"{command} {name}")
        await until(pilot, lambda: any(why in said.message for said in app._notifications))
        assert prompt(pilot) == f"{command} {name}"  # to be mended
        assert app.host.client is client
        assert client.ready is not None
        assert (len(app.desk.talks), stage.builds, len(app.screen_stack)) == (1, 1, 1)
        app.prompt.put("")
        await ask(pilot, "b")
        assert answers(pilot) == ["ok", "ok"]
    assert stage.seen == ["\0a", "\0a\0ok\0b"]


@pytest.mark.parametrize(
    ("command", "config", "why"),
    [
        ("/model", '{"model_type": "llama", "hidden_size": 3}', "no tensor of the weights has it"),
        ("/compare", '{"model_type": "nosuch"}', "of model type 'nosuch', which mlx_lm does not know"),
        ("ctrl+o", "[", "config.json is not sound JSON"),
    ],
)
async def test_a_model_whose_files_cannot_be_loaded_leaves_the_working_one_alone(
    command: str, config: str, why: str, stage: Any, tmp_path: Path, private_cache: Path
) -> None:
    app, bad = new_chat(own_model(tmp_path)), folder_of(tmp_path, "bad", config)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await ready(pilot)
        client = app.host.client
        if command == "ctrl+o":
            await pilot.press(command)
            await until(pilot, lambda: isinstance(app.screen, ModelPicker))
            await pilot.press("slash")
            app.screen.query_one(Input).value = bad
            await until(pilot, lambda: f"use {bad}" in screen(app))
            await pilot.press("enter")
        else:
            await type_command(pilot, f"{command} {bad}")
        await until(pilot, lambda: any(why in said.message for said in app._notifications))
        assert app.host.client is client
        assert (client.ready is not None, len(app.desk.talks), stage.builds) == (True, 1, 1)
        app.prompt.put("")
        await ask(pilot, "a")
        assert answers(pilot) == ["ok"]


async def test_a_model_that_does_not_load_names_the_way_back(
    stage: Any, tmp_path: Path, private_cache: Path
) -> None:
    own, adapters = folder_of(tmp_path, "own"), (("tuned", str(tmp_path)),)
    app = new_chat(own, adapters=adapters)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        for name in ("first", "second"):
            stage.build_error = ModelFileError("damaged [within]", next_step="get it again")
            await type_command(pilot, f"/model {folder_of(tmp_path, name)}")
            await until(pilot, lambda n=name: app.host.model == n and state(pilot) == "failed")  # type: ignore[misc]
            said = str(app.query(Failure).last().content)
            assert said == f"✖ damaged [within]\n→ get it again\n→ /model {own} goes back"
        assert stage.configs[-1].adapters == ()
        await ask(pilot, f"/model {own}")
        await ready(pilot)
        assert stage.configs[-1] == stage.configs[0]
        assert stage.configs[0].adapters == adapters
        await ask(pilot, "b")
        assert stage.seen[-1] == "\0a\0ok\0b"
        stage.build_error = ModelFileError("of the engine that had run")
        app.host.client._dispatch(app.host.client._life, [Died(EngineDiedError("killed by a test"))])
        await until(pilot, lambda: state(pilot) == "failed")
        assert "goes back" not in str(app.query(Failure).last().content)


async def test_a_model_that_is_not_here_is_fetched_on_the_screen_first(
    chat: ChatApp, stage: Any, slow_hub: SlowHub
) -> None:
    stage.answers["a"], stage.held = "one two", True
    async with chat.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        client = chat.host.client
        await type_command(pilot, "a")
        stage.allow(3)
        await until(pilot, lambda: answers(pilot) == ["one"])
        await type_command(pilot, f"/model {REPO}")
        await until(pilot, lambda: "50.0 kB of 102 kB" in screen(chat))
        assert "Esc cancels" in screen(chat)
        stage.release()  # the answer goes on behind the download
        await until(pilot, lambda: answers(pilot) == ["one two"] and not chat.desk.answering)
        assert chat.host.client is client
        slow_hub.go.set()
        await until(pilot, lambda: chat.host.client is not client and chat.host.state == "ready")
        assert chat.host.config.model == REPO
        assert client.ready is None
        assert (hub.info(REPO).path is not None, stage.builds) == (True, 2)
        await ask(pilot, "b")
        assert answers(pilot) == ["one two", "ok"]


async def test_a_download_that_is_cancelled_changes_nothing(
    chat: ChatApp, stage: Any, slow_hub: SlowHub
) -> None:
    async with chat.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        client = chat.host.client
        await type_command(pilot, f"/model {REPO}")
        await until(pilot, lambda: "50.0 kB of" in screen(chat))
        await pilot.press("escape")
        await until(pilot, lambda: slow_hub.counts[-1].stopped)
        slow_hub.go.set()
        await until(pilot, lambda: "50.0 kB are kept" in note(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: len(chat.screen_stack) == 1)
        assert chat.host.client is client
        assert (len(chat.desk.talks), stage.builds) == (1, 1)
        await ask(pilot, "a")
        assert answers(pilot) == ["ok"]


async def test_a_second_model_is_fetched_before_the_comparison(
    chat: ChatApp, stage: Any, fake_hub: Any
) -> None:
    fake_hub.served["model.safetensors"] = b"x" * len(fake_hub.files["model.safetensors"])
    async with chat.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await type_command(pilot, f"/compare {REPO}")
        await until(pilot, lambda: isinstance(chat.screen, ModelPicker) and "arrived altered" in note(pilot))
        assert (len(chat.desk.talks), stage.builds) == (1, 1)
        fake_hub.served.clear()
        await pilot.press("slash", "enter")  # its row is the one that is highlighted
        await until(pilot, lambda: len(chat.desk.talks) == 2)
        right = chat.desk.talks[1]
        await until(pilot, lambda: right.host.state == "ready")
        assert right.host.config.model == REPO
        await ask(pilot, "a")
        assert answers(pilot) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("name", "offline", "step"),
    [
        (REPO, False, f"/model {REPO} downloads it, Ctrl+O shows others"),
        (REPO, True, "without --offline it can be downloaded"),
        ("qwen3-06b", False, "Ctrl+O shows those there are"),
    ],
)
async def test_a_chat_opens_without_its_model_and_says_what_to_do(
    name: str, offline: bool, step: str, stage: Any, tmp_path: Path, fake_hub: Any
) -> None:
    app = new_chat(name, offline=offline)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: state(pilot) == "failed")
        assert step in str(app.query_one(Failure).content)
        app.prompt.put("a")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.query(Failure)) == 2 and prompt(pilot) == "a")
        assert (stage.builds, fake_hub.requests) == (0, [])
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(app.screen, ModelPicker))
        await pilot.press("escape")
        if not offline:
            await type_command(pilot, f"/model {REPO}")
        else:
            await type_command(pilot, f"/model {folder_of(tmp_path, 'own')}")
        await ready(pilot)
        await ask(pilot, "a")
        assert answers(pilot) == ["ok"]


async def test_an_engine_that_comes_back_fetches_nothing(stage: Any, fake_hub: Any) -> None:
    hub.resolve(REPO)
    app = new_chat(REPO)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        hub.remove(REPO)
        fake_hub.requests.clear()
        app.host.client._dispatch(app.host.client._life, [Died(EngineDiedError("killed by a test"))])
        await until(pilot, lambda: state(pilot) == "failed")
        assert "is not on this machine" in str(app.query(Failure).last().content)
        assert (stage.builds, fake_hub.requests) == (1, [])
