"""What a test does at the chat screen, and what it sees there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Static

from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.stream import RequestStream
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.prompt import Prompt
from ferrum_tui.status import StatusLine

GREEDY = SamplingChoice({"max_tokens": None}, suggest=False)  # no limit of its own
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
    """The Markdown source of every answer."""
    return [answer.body.source for answer in pilot.app.query(Answer)]


def below(pilot: Pilot[Any]) -> str:
    return str(list(pilot.app.query(".below").results(Static))[-1].content)


def blocks(app: ChatApp) -> int:
    """KV blocks in use."""
    step = app.host.client.last_step
    return step.kv.used_blocks if step else 0


def stream_of(app: ChatApp) -> RequestStream:
    assert app.desk.talk.turn is not None
    assert app.desk.talk.turn.stream is not None
    return app.desk.talk.turn.stream
