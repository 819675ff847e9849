"""The model picker: what is listed, a choice, a download from a hub on this machine, deleting."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList, ProgressBar, Static

from ferrum_mlx import hub
from ferrum_mlx.fit import Fit
from ferrum_tui.screens import listing
from ferrum_tui.screens.confirm import Confirm
from ferrum_tui.screens.models import ModelPicker

from .driver import screen, until
from .screen_host import LOOKS, NOTHING, Host, note
from .slow_hub import SlowHub

REPO = "tiny/model"


TOO_BIG = Fit(5_100_000_000, 3_200_000_000, False, "")


async def listed(pilot: Any) -> None:
    await until(pilot, lambda: pilot.app.screen.query_one(OptionList).option_count > 0)


async def choose(pilot: Any, name: str) -> None:
    await pilot.press("slash")
    pilot.app.screen.query_one(Input).value = name
    await until(pilot, lambda: f"use {name}" in screen(pilot.app))
    await pilot.press("enter")


async def test_the_catalogue_is_listed_without_network(private_cache: Path, fake_hub: Any) -> None:
    app = Host(ModelPicker("smollm2-135m", fit=lambda _: TOO_BIG))
    async with app.run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        shown = screen(app)
        assert "● " in next(line for line in shown.splitlines() if "smollm2-135m" in line)
        assert "too big: needs 5.1 GB of 3.2 GB" in shown
        assert "Apache-2.0" in shown
        assert "40k" in shown
        await pilot.press("escape")
    assert app.result is None
    assert fake_hub.requests == []


@pytest.mark.parametrize(("backend", "refused"), [("torch", True), ("mlx", False)])
async def test_what_a_backend_would_refuse_is_said_with_its_reason(
    backend: str, refused: bool, private_cache: Path
) -> None:
    app = Host(ModelPicker(backend=backend, fit=lambda _: None))
    async with app.run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"qwen3.5-0.8b", "down")
        reason = "take --backend mlx" if refused else "memory: unknown"
        await until(pilot, lambda: "smollm2" not in screen(app) and reason in screen(app))
        assert ("✗  refused" in screen(app)) is refused
    assert all(each.name != "qwen3.5-0.8b" for each in listing.suggestions(lambda _: None, "torch"))


class SlowToGo(Static):
    """Is removed after what is beside it, so that a list can come in between."""

    def __init__(self, going: threading.Event) -> None:
        super().__init__()
        self._going = going

    async def on_unmount(self) -> None:
        self._going.set()
        await asyncio.sleep(0.1)


async def test_a_list_that_comes_while_it_closes_is_left(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, given = threading.Event(), threading.Event()

    def late(*_: Any) -> list[listing.Entry]:
        assert going.wait(30)
        given.set()
        return []

    monkeypatch.setattr(listing, "entries", late)
    app = Host(ModelPicker(fit=lambda _: TOO_BIG))
    async with app.run_test(size=(120, 36)) as pilot:
        await app.screen.mount(SlowToGo(going))
        await pilot.press("escape")
        await until(pilot, lambda: given.is_set() and len(app.screen_stack) == 1)
    assert app.result is None


@pytest.mark.parametrize(("size", "theme"), LOOKS)
async def test_it_fits_every_screen(size: tuple[int, int], theme: str, private_cache: Path) -> None:
    app = Host(ModelPicker(fit=lambda _: Fit(2, 100, True, "")), theme)
    async with app.run_test(size=size) as pilot:
        await listed(pilot)
        line = next(line for line in screen(app).splitlines() if "gemma-3-1b" in line)
        assert "↓ ?" in line
        assert "✓" in line


async def test_the_filter_and_a_cached_model(fake_hub: Any) -> None:
    hub.resolve(REPO)
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"iny")
        await until(pilot, lambda: "smollm2" not in screen(app))
        assert "102 kB" in screen(app)
        await pilot.press("down", "up", "enter")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == REPO


async def test_a_name_of_ones_own_may_be_typed(tmp_path: Path, private_cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    app = Host(ModelPicker(offline=True))
    async with app.run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        await choose(pilot, "./no.gguf")
        await until(pilot, lambda: "no file or folder no.gguf" in note(pilot))
        await choose(pilot, "tiny/model")
        await until(pilot, lambda: "--offline forbids" in note(pilot))
        await choose(pilot, "[/x]/y[bold]")
        await until(pilot, lambda: "no model '[/x]/y[bold]'" in note(pilot))
        assert "use [/x]/y[bold]" in screen(app)
        await choose(pilot, str(tmp_path / "m.gguf"))
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == str(tmp_path / "m.gguf")


async def test_a_download_is_shown_and_ends_with_the_name(slow_hub: SlowHub) -> None:
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await choose(pilot, REPO)
        await until(pilot, lambda: "50.0 kB of 102 kB" in screen(app))
        assert f"fetching {REPO}" in screen(app)
        assert app.screen.query_one(ProgressBar).percentage == pytest.approx(50_000 / 102_400, rel=0.01)
        await pilot.press("enter")  # on the row that is highlighted: one download at a time
        slow_hub.go.set()
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == REPO
    assert hub.info(REPO).path is not None


@pytest.mark.parametrize("key", ["c", "escape"])
async def test_a_cancelled_download_is_kept_and_goes_on(key: str, slow_hub: SlowHub) -> None:
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await choose(pilot, REPO)
        await until(pilot, lambda: "50.0 kB of" in screen(app))
        await pilot.press(key)
        await until(pilot, lambda: "stopping" in screen(app))
        await until(pilot, lambda: slow_hub.counts[-1].stopped)
        slow_hub.go.set()  # it ends at the next bytes
        await until(pilot, lambda: "50.0 kB are kept; choose it again" in note(pilot))
        assert app.screen.query_one("#download").display is False
        assert hub.info(REPO).path is None
        await pilot.press("slash", "enter")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == REPO
    assert slow_hub.ranges[0] is None
    assert slow_hub.ranges[-1] == "bytes=50000-"


async def test_a_second_escape_does_not_wait(slow_hub: SlowHub) -> None:
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await choose(pilot, REPO)
        await until(pilot, lambda: "50.0 kB of" in screen(app))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: app.result is None)
    assert hub.info(REPO).path is None


async def test_an_error_stays_in_the_screen_and_can_be_tried_again(fake_hub: Any) -> None:
    fake_hub.served["model.safetensors"] = b"x" * len(fake_hub.files["model.safetensors"])
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await choose(pilot, REPO)
        await until(pilot, lambda: "arrived altered" in note(pilot) and "tries again" in note(pilot))
        fake_hub.served.clear()
        await pilot.press("slash", "enter")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == REPO


async def test_deleting_asks_and_says_what_is_freed(fake_hub: Any) -> None:
    hub.resolve(REPO)
    app = Host(ModelPicker(REPO))
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert f"Delete {REPO}? 102 kB become free." in screen(app)
        await pilot.press("enter")  # No has the focus
        await until(pilot, lambda: isinstance(app.screen, ModelPicker))
        assert hub.info(REPO).path is not None
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert await pilot.click("#yes")
        await until(pilot, lambda: isinstance(app.screen, ModelPicker) and "is deleted" in note(pilot))
        await until(pilot, lambda: REPO not in str(app.screen.query_one(OptionList).options))
    assert hub.info(REPO).path is None


async def test_the_mouse_takes_a_row(fake_hub: Any) -> None:
    hub.resolve(REPO)
    app = Host(ModelPicker())
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"iny")
        await until(pilot, lambda: "smollm2" not in screen(app))
        rows = screen(app).splitlines()
        y = next(i for i, line in enumerate(rows) if REPO in line)
        await pilot.click(offset=(20, y))
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == REPO
