"""What a test does at the chat screen, and what it sees there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Markdown, Static

from ferrum_mlx.stream import RequestStream
from ferrum_tui.app import ChatApp
from ferrum_tui.prompt import Prompt
from ferrum_tui.status import StatusLine
from ferrum_tui.transcript import Answer

WAIT = 30.0  # seconds before a test gives up; never a measure of speed


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, screen(pilot.app)
        await pilot.pause(0.01)


def screen(app: Any) -> str:
    """What the terminal would show, as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips)


async def type_in(pilot: Pilot[Any], text: str) -> None:
    await pilot.press(*({" ": "space", "/": "slash", "\n": "ctrl+j"}.get(char, char) for char in text))


async def ready(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: state(pilot) == "ready")


def state(pilot: Pilot[Any]) -> str:
    return pilot.app.query_one(StatusLine).status.state


def prompt(pilot: Pilot[Any]) -> str:
    return pilot.app.query_one(Prompt).text


def answers(pilot: Pilot[Any]) -> list[str]:
    """The Markdown source, then the text still open, of every answer."""
    found = []
    for answer in pilot.app.query(Answer):
        parts = [part.source for part in answer.query(Markdown)]
        parts += [str(part.content) for part in answer.query(".open-block").results(Static)]
        found.append("".join(parts))
    return found


def below(pilot: Pilot[Any]) -> str:
    return str(list(pilot.app.query(".below").results(Static))[-1].content)


def stream_of(app: ChatApp) -> RequestStream:
    assert app._turn is not None
    assert app._turn.stream is not None
    return app._turn.stream
