"""What is thought stands in one dim line above the answer, and is no part of what is sent back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp

from .driver import GREEDY, WAIT, answers, ready, screen, type_in, until


def thought(app: ChatApp) -> str:
    return str(app.query(".thought").last(Static).content)


async def test_thinking_is_one_line_above_the_answer(app: ChatApp, stage: Any) -> None:
    stage.answers |= {"a": "<think>first\nsecond thing</think>\n\nDone.", "b": "plain"}
    stage.held = True
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        stage.allow(len("<think>first\nsecond thing"))
        await until(pilot, lambda: thought(app) == "thinking · second thing")
        await until(pilot, lambda: "second thing" in screen(app))
        assert answers(pilot) == [""]
        stage.release()
        stage.allow(100)
        await ready(pilot)
        assert answers(pilot) == ["Done."]
        took = app.desk.talk.path[1].thought_s
        assert 0 < took < WAIT
        assert re.fullmatch(r"▸ thought for ([1-9]\d* ms|\d+\.\d\d s)", thought(app))
        assert "first" not in screen(app)
        app.query_one(Answer).focus()
        await pilot.press("space")
        await until(pilot, lambda: "first" in screen(app))
        assert thought(app).startswith("▾ thought for")
        await pilot.press("space")
        await until(pilot, lambda: "first" not in screen(app))
        await pilot.press("escape")
        await pilot.press("b", "enter")
        await until(pilot, lambda: answers(pilot) == ["Done.", "plain"])
        await ready(pilot)
        assert stage.seen == ["\0a", "\0a\0Done.\0b"]
        assert not app.query(".thought").last().display


async def test_an_answer_that_is_all_thinking(app: ChatApp, stage: Any) -> None:
    stage.answers["a"] = "<think>" + "x\x1b[31m" * 100
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        await until(pilot, lambda: thought(app).startswith("▸ thought"))
        await ready(pilot)
        assert "\x1b" not in screen(app)
        assert "characters" not in thought(app)


@pytest.mark.parametrize(
    ("took", "line"),
    [(0.0, "▸ thought"), (2e-5, "▸ thought"), (0.4, "▸ thought for 400 ms"), (3.2, "▸ thought for 3.20 s")],
)
async def test_after_a_resume_it_says_what_was_measured(stage: Any, took: float, line: str) -> None:
    conversation = Conversation()
    asked = conversation.add("user", "a", parent=None)
    answer = conversation.add("assistant", "Done.", parent=asked.id)
    answer.thinking, answer.thought_s, answer.ending = "hm", took, "stop"
    conversation.leaf = answer.id
    app = ChatApp(
        EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, conversation=conversation
    )
    async with app.run_test() as pilot:
        await ready(pilot)
        assert thought(app) == line


async def test_the_switch_reaches_the_engine(stage: Any) -> None:
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, thinking=False)
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "hi")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
        assert stage.seen == ['{"thinking": false}\0hi']


async def test_unfolded_while_it_comes_it_shows_its_end(app: ChatApp, stage: Any) -> None:
    lines = [f"thought {i}" for i in range(300)]
    stage.answers["a"] = "<think>" + "\n".join(lines) + "\nlast</think>\n\nDone."
    stage.held = True
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        stage.allow(len("<think>" + "\n".join(lines)))
        await until(pilot, lambda: thought(app) == "thinking · thought 299")
        app.query_one(Answer).thought.toggle()
        shown = thought(app).split("\n")
        assert shown[:2] == ["thinking · thought 299", "…"]
        assert shown[2:] == lines[-len(shown) + 2 :]
        assert 50 < len(shown) < 250
        stage.release()
        await ready(pilot)
        assert thought(app).split("\n")[1:] == [*lines, "last"]
