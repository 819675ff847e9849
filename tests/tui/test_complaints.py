"""What people hold against chats in a terminal, where no other file has it: brackets taken for markup, speeds
out of chunks, a screen that works while nothing happens, escape sequences in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.settings import Settings
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.messages import Delta
from ferrum_tui import app as chat_app
from ferrum_tui import turn as turns
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.message import UserMessage
from ferrum_tui.transcript import Transcript
from ferrum_tui.turn import Turn

from .conversing import ask
from .driver import GREEDY, answers, ready, screen, type_in, until

TRAPS = ["a[/0] list[int]", "[@click=quit]x[/]$accent"]  # as long as is shown of a system message


@pytest.mark.parametrize("text", TRAPS)
async def test_brackets_are_text_in_every_corner(
    stage: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the title, the prompt's border, notes, notices, errors, a comparison's titles, lists of files."""
    monkeypatch.chdir(tmp_path)
    file = text.replace("/", "").replace(" ", "-") + ".md"
    Path(file).touch()
    app = ChatApp(
        EngineConfig(backend="fake"),
        GREEDY,
        text,
        EngineClient.in_thread,
        store=Store(tmp_path / "sessions.db"),
        conversation=Conversation(title=text, system=text),
        notes=[text],
    )
    async with app.run_test(size=(150, 40), notifications=True) as pilot:
        await ready(pilot)
        await until(pilot, lambda: f"sys: {text}" in screen(app))
        await until(pilot, lambda: f"note: {text}" in screen(app))
        assert text in screen(app).splitlines()[0]
        app.prompt.put(f"see @{file[:2]}")
        await until(pilot, lambda: f"▸ {file}" in screen(app))
        await ask(pilot, f"/theme {text}")
        await until(pilot, lambda: f"there is no theme {text}" in screen(app))
        await ask(pilot, f"/rename new {text}")
        assert f"new {text}" in screen(app).splitlines()[0]
        await ask(pilot, f"/compare 'stop={text}'")
        await until(pilot, lambda: "stop=" in screen(app) and len(app.desk.talks) == 2)
        assert text in screen(app).splitlines()[1]
        await ask(pilot, text)
        assert answers(pilot) == ["ok", "ok"]


def test_speed_is_of_tokens_not_of_pieces_and_without_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of those that were there at once, as after a burst or while the screen stood still."""
    clock = iter([100.0, 103.0, 103.5, 105.0])  # sent; then one a look
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))
    looks = [
        [Delta("1", "a", (1,)), Delta("1", "", (2, 3))],
        [Delta("1", "bcd", (4, 5, 6, 7, 8))],
        [],
        [Delta("1", "e", tuple(range(9, 20))), Delta("1", "f", (20, 21))],
    ]
    message = Message(id=2, parent=1, role="assistant")
    turn = Turn(message, Answer(message))

    class Stream:
        def drain(self) -> list[Delta]:
            return looks.pop(0)

    turn.sent(Stream())  # type: ignore[arg-type]
    seen = []
    for _ in range(len(looks)):
        turn.drain()
        status = turn.status()
        seen.append((status.tokens, status.decode_tps, status.ttft_s))
    assert seen == [(3, None, 3.0), (8, 10.0, 3.0), (8, 10.0, 3.0), (21, 9.0, 3.0)]


async def test_nothing_works_while_nothing_happens(app: ChatApp, stage: Any) -> None:
    assert chat_app._DRAINS_PER_SECOND / chat_app._DRAINS_PER_STATUS <= 4  # times the figures are drawn
    async with app.run_test() as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        seen = -1
        while app._drains != seen:
            seen = app._drains
            await pilot.pause(0.3)
        stage.held = True
        await type_in(pilot, "b")
        await pilot.press("enter")
        await until(pilot, lambda: app._drains > seen)  # the count sees work
        stage.release()


async def test_a_short_chat_begins_at_the_top_and_a_long_one_shows_its_end(app: ChatApp, stage: Any) -> None:
    stage.answers["long"] = "".join(f"Line {i}.\n\n" for i in range(40))
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        transcript = app.query_one(Transcript)
        top = transcript.content_region.y + 1  # a message's margin
        await until(pilot, lambda: app.query_one(UserMessage).region.y == top)
        await ask(pilot, "long")
        await until(pilot, lambda: "Line 39." in screen(app) and transcript.is_vertical_scroll_end)
        await pilot.press("ctrl+n")
        await ask(pilot, "b")
        await until(pilot, lambda: app.query_one(UserMessage).region.y == top)
        assert not transcript.border_subtitle


def test_no_escape_sequence_gets_into_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferrum_mlx", "chat", "--backend", "fake", "--max-tokens", "5"],
        input="hello\n/help\n",
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"},
    )
    assert done.stdout
    assert done.stderr
    assert "\x1b" not in done.stdout + done.stderr


async def test_a_theme_that_there_is_not_is_said_and_ours_taken(stage: Any) -> None:
    app = ChatApp(
        EngineConfig(backend="fake"),
        GREEDY,
        make_client=EngineClient.in_thread,
        settings=Settings(theme="a[/0]"),
    )
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: "note: the settings name 'a[/0]', which is no theme" in screen(app))
        assert app.theme == "ferrum"
