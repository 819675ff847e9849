"""The screen as SVG, against stored files; FERRUM_SNAPSHOTS=write rewrites them, for people to look at."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import textual
from textual.pilot import Pilot
from textual.widgets import OptionList

from ferrum_mlx.errors import EngineDiedError
from ferrum_tui.host import EngineGone
from ferrum_tui.notices import Failure

from . import staged
from .driver import ready, screen, until

FOLDER = Path(__file__).with_name("snapshots")
RECORDED = FOLDER / "textual-version.txt"
WRITE = os.environ.get("FERRUM_SNAPSHOTS") == "write"
SIZES = [(120, 36), (80, 24), (40, 12)]
THEMES = ["textual-light", "ansi-dark", "NO_COLOR"]


async def empty(pilot: Pilot[Any]) -> None:
    pass


async def answer(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: "cached, 漢字" in screen(pilot.app) or "214 tok" in screen(pilot.app))


async def error(pilot: Pilot[Any]) -> None:
    app: Any = pilot.app
    gone = EngineDiedError(
        "the engine ran out of memory: [METAL] [/x]", next_step="take a smaller --max-model-len"
    )
    app.post_message(EngineGone(app.host, gone, started=False))
    await until(pilot, lambda: bool(app.query(Failure)))


async def engine(pilot: Pilot[Any]) -> None:
    app: Any = pilot.app
    await staged.at_work(app)
    await pilot.press("ctrl+b")
    await until(pilot, lambda: "Esc closes" in screen(app))


async def sessions(pilot: Pilot[Any]) -> None:
    await pilot.press("ctrl+s")
    await listed(pilot)


async def models(pilot: Pilot[Any]) -> None:
    await pilot.press("ctrl+o")
    await listed(pilot)


async def listed(pilot: Pilot[Any]) -> None:
    def rows() -> bool:
        lists = list(pilot.app.screen.query(OptionList))
        return len(pilot.app.screen_stack) > 1 and bool(lists) and lists[0].option_count > 0

    await until(pilot, rows)


async def settings(pilot: Pilot[Any]) -> None:
    await pilot.press("f2")
    await until(pilot, lambda: len(pilot.app.screen_stack) > 1)


async def keys(pilot: Pilot[Any]) -> None:
    await pilot.press("f1")
    await until(pilot, lambda: len(pilot.app.screen_stack) > 1)


async def comparison(pilot: Pilot[Any]) -> None:
    app: Any = pilot.app
    await app.send("/compare temperature=1.5")
    await app.send("Which is it?")
    await until(pilot, lambda: not app.desk.answering)


State = Callable[[Pilot[Any]], Awaitable[None]]
STATES: list[State] = [empty, answer, error, engine, sessions, models, settings, keys, comparison]
CASES = [(state, size, "ferrum") for state in STATES for size in SIZES]
CASES += [(state, (80, 24), theme) for state in (answer, engine) for theme in THEMES]
NAMES = [f"{state.__name__}-{size[0]}x{size[1]}-{theme}" for state, size, theme in CASES]


@pytest.mark.parametrize(("state", "size", "theme"), CASES, ids=NAMES)
async def test_looks_as_it_did(
    state: State, size: tuple[int, int], theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_on_another_textual()
    drawn = await picture(state, size, theme, tmp_path, monkeypatch)
    if theme == "NO_COLOR":
        assert all(red == green == blue for red, green, blue in colours(drawn))
    compare(f"{state.__name__}-{size[0]}x{size[1]}-{theme}", drawn)


async def picture(
    state: State, size: tuple[int, int], theme: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    staged.freeze(monkeypatch)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if theme == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
        theme = "ferrum"
    opened = None if state is empty else staged.conversation()
    app = staged.staged(folder, opened, theme)
    async with app.run_test(size=size) as pilot:
        await ready(pilot)
        await state(pilot)
        await staged.at_rest(pilot)
        return normalised(app.export_screenshot())


def normalised(svg: str) -> str:
    """Without what differs from run to run or draws no cell: ids, fonts, clipping, the window's frame."""
    svg = re.sub(r"terminal-\d+-", "", svg)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<clipPath.*?</clipPath>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"| shape-rendering="crispEdges"', "", svg)
    svg = re.sub(r"<circle [^>]*/>\s*|<text class=\"title\".*?</text>", "", svg)
    svg = re.sub(r"<text [^>]*>\s*</text>", "", svg)  # line ends
    svg = re.sub(r"\.r\d+ \{ fill: #c5c8c6 \}\s*", "", svg)  # of line ends: Rich's own, no theme's
    svg = re.sub(r"(?<=>)(?=<(rect|text) )", "\n", svg)
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())


def colours(svg: str) -> list[tuple[str, str, str]]:
    return re.findall(r"#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})", svg)


def skip_on_another_textual() -> None:
    recorded = RECORDED.read_text().strip() if RECORDED.exists() else "none"
    if not WRITE and recorded != textual.__version__:
        pytest.skip(f"recorded with Textual {recorded}, this is {textual.__version__}")


def compare(name: str, drawn: str) -> None:
    file = FOLDER / f"{name}.svg"
    if WRITE:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(drawn)
        RECORDED.write_text(f"{textual.__version__}\n")
        return
    was = file.read_text() if file.exists() else ""
    if was != drawn:
        changed = sorted(set(drawn.splitlines()) ^ set(was.splitlines()))
        pytest.fail(
            f"{file.name} has changed; FERRUM_SNAPSHOTS=write takes it over, then look at it: {changed[:6]}"
        )


async def test_another_text_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_on_another_textual()
    monkeypatch.setattr(staged, "ANSWER", staged.ANSWER.replace("used", "user"))
    drawn = await picture(answer, (120, 36), "ferrum", tmp_path, monkeypatch)
    if not WRITE:
        with pytest.raises(pytest.fail.Exception, match="has changed"):
            compare("answer-120x36-ferrum", drawn)


def test_no_stored_picture_is_of_nothing() -> None:
    """Each stored file belongs to a case: one that lost its test would never fail again."""
    assert sorted(file.stem for file in FOLDER.glob("*.svg")) == sorted(NAMES)
