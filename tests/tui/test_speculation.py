"""One short item of the status line tells how guessing goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_mlx.metrics import SpeculationStats
from ferrum_tui.app import ChatApp
from ferrum_tui.status import Status, StatusLine

from .driver import ready, screen

GUESSING = SpeculationStats(name="ngram", drafted=30, accepted=19, verifies=10)


@pytest.mark.parametrize(
    ("stats", "shown"),
    [(GUESSING, "spec 63% ×2.9"), (None, ""), (SpeculationStats(name="ngram", why="measuring"), "")],
)
async def test_rate_and_length(app: ChatApp, stats: SpeculationStats | None, shown: str) -> None:
    async with app.run_test(size=(100, 24)) as pilot:
        await ready(pilot)
        line = app.query_one(StatusLine)
        line.status = Status("generating", speculation=stats)
        await pilot.pause()
        assert shown in screen(app)
        assert ("spec" in screen(app)) is bool(shown)


async def test_why_there_are_none_is_a_tooltip(app: ChatApp) -> None:
    async with app.run_test(size=(100, 24)) as pilot:
        await ready(pilot)
        line = app.query_one(StatusLine)
        line.status = Status("generating", speculation=replace(GUESSING, why="too dear"))
        assert line.tooltip == "no guesses: too dear"
        line.status = Status("generating", speculation=GUESSING)
        assert line.tooltip is None
