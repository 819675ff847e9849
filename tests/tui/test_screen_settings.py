"""Settings: fields and their errors, for this chat, as the default, back to the model's own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from textual.widgets import Input, Select, TextArea

from ferrum_tui.screens.settings import SettingsScreen, Setup

from .driver import screen, until
from .screen_host import LOOKS, NOTHING, Host, note

SUGGESTED = {"temperature": 0.2, "top_p": 0.9}


def box(app: Host, name: str) -> Input:
    return app.screen.query_one(f"#{name}", Input)


async def test_what_is_set_comes_back(tmp_path: Path) -> None:
    setup = Setup(
        sampling={"temperature": 0.7, "stop": ("a\\n", "b"), "max_tokens": None, "min_tokens": 3},
        system="Be [/x] brief.",
        thinking=False,
        theme="nord",
        panel=False,
    )
    app = Host(SettingsScreen(setup, SUGGESTED, tmp_path / "config.toml"))
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: str(tmp_path / "config.toml") in note(pilot))
        assert box(app, "top_p").placeholder == "0.9"
        assert box(app, "top_k").placeholder == "0"
        assert box(app, "max_tokens").value == "none"
        await pilot.press("f2")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == setup
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize(("size", "theme"), LOOKS)
async def test_a_wrong_value_is_told_below_its_field(
    size: tuple[int, int], theme: str, tmp_path: Path
) -> None:
    app = Host(SettingsScreen(Setup(), path=tmp_path / "config.toml"), theme)
    async with app.run_test(size=size) as pilot:
        await pilot.press(*"abc")
        await until(pilot, lambda: "temperature is 'abc'" in screen(app))
        await pilot.press("f2", "f4")
        assert app.result is NOTHING
        await pilot.press("ctrl+u", *"0.5")
        await until(pilot, lambda: "temperature is" not in screen(app))
        await pilot.press("tab", *"0.9", "enter")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result.sampling == {"temperature": 0.5, "top_p": 0.9}


async def test_values_that_do_not_go_together(tmp_path: Path) -> None:
    app = Host(SettingsScreen(Setup(), path=tmp_path / "config.toml"))
    async with app.run_test(size=(80, 24)) as pilot:
        box(app, "max_tokens").value = "5"
        box(app, "min_tokens").value = "9"
        await pilot.press("enter")
        await until(pilot, lambda: "min_tokens is 9" in note(pilot))
        await pilot.press("escape")
    assert app.result is None


async def test_save_as_default_and_reset(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('# mine\nmodel = "m"\n[sampling]\nseed = 7\nxtc_threshold = 0.2\n')
    app = Host(SettingsScreen(Setup(sampling={"seed": 7, "xtc_threshold": 0.2}), SUGGESTED, path))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f3")
        assert box(app, "seed").value == ""
        box(app, "temperature").value = "1"
        app.screen.query_one("#stop", TextArea).text = "User:\n\\n\\n"
        app.screen.query_one("#system", TextArea).text = "Brief."
        app.screen.query_one("#thinking", Select).value = "on"
        app.screen.query_one("#theme", Select).value = "gruvbox"
        app.screen.query_one("#panel", Select).value = "closed"
        await pilot.press("f4")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result.sampling == {"temperature": 1.0, "stop": ("User:", "\n\n")}
    assert path.read_text().startswith("# mine\n")
    assert tomllib.loads(path.read_text()) == {
        "model": "m",
        "sampling": {"temperature": 1.0, "stop": ["User:", "\n\n"]},
        "system": "Brief.",
        "thinking": True,
        "theme": "gruvbox",
        "panel": False,
    }


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("not = = toml")
    app = Host(SettingsScreen(Setup(), path=path))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f4")
        await until(pilot, lambda: "cannot change" in note(pilot))
        assert app.result is NOTHING
    assert path.read_text() == "not = = toml"


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
async def test_choosing_with_the_keyboard(size: tuple[int, int], tmp_path: Path) -> None:
    app = Host(SettingsScreen(Setup(), path=tmp_path / "config.toml"))
    async with app.run_test(size=size) as pilot:
        await pilot.press("shift+tab", "enter", "down", "enter")
        await until(pilot, lambda: app.screen.query_one("#panel", Select).value == "closed")
        await pilot.press("shift+tab", "enter")
        await until(pilot, lambda: "dracula" in screen(app))
        await pilot.press("escape")  # closes the list alone
        await pilot.press("f2")
        await until(pilot, lambda: app.result is not NOTHING)
    assert app.result == Setup(theme="ferrum", panel=False)
