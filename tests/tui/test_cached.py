"""Turns of the chat screen find the KV of the turns before, and the screen says so."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from ferrum_mlx import build
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui.app import ChatApp

from ..unit.chat_engine import ANSWER, BLOCK, build_chat
from .driver import GREEDY, below, ready, type_in, until

SYSTEM = "be kind to whoever asks"


def belows(pilot: Pilot[Any]) -> int:
    """How many answers have their last line."""
    return sum(bool(str(part.content)) for part in pilot.app.query(".below").results(Static))


async def test_a_turn_finds_the_turns_before_and_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_engine", build_chat)
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, SYSTEM, EngineClient.in_thread)
    prompts: list[int] = []
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(pilot)
        for turn in range(3):
            await type_in(pilot, f"ask {turn}")
            await pilot.press("enter")
            await until(pilot, lambda turn=turn: belows(pilot) == turn + 1)  # type: ignore[misc]
            prompts.append(app.host.client.totals().prompt_tokens - sum(prompts))
            if turn == 0:
                assert "cached" not in below(pilot)
            else:
                cached = (prompts[-2] + ANSWER) // BLOCK * BLOCK
                assert f" · {cached} of {prompts[-1]} prompt tok cached" in below(pilot)
