"""Messages on screen: what their keys and clicks do, and that their text is text."""

from __future__ import annotations

from typing import Any

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ModelFileError
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.message import UserMessage
from ferrum_tui.prompt import Prompt
from ferrum_tui.screens import listing
from ferrum_tui.transcript import Transcript

from .conversing import SIZE, ask, mounted
from .driver import GREEDY, answers, prompt, ready, screen, type_in, until


async def test_keys_walk_over_messages_and_back_to_the_prompt(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "b")
        await pilot.press("shift+tab")
        assert isinstance(app.focused, Answer)
        assert app.focused is list(app.query(Answer))[-1]
        await pilot.press("up", "up", "up", "up")
        assert app.focused is app.query(UserMessage).first()
        await pilot.press("j")
        assert app.focused is app.query(Answer).first()
        await pilot.press("escape")
        assert isinstance(app.focused, Prompt)


async def test_edit_and_again_and_branches_by_key(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "b")
        app.query(UserMessage).first().focus()
        await pilot.press("e")
        await until(pilot, lambda: prompt(pilot) == "a")
        app.query_one(Prompt).put("other")
        await pilot.press("enter")
        await until(pilot, lambda: mounted(app) == ["other", "ok"])
        await until(pilot, lambda: not app.desk.answering)
        app.query_one(UserMessage).focus()
        await pilot.press("left")
        await until(pilot, lambda: mounted(app) == ["a", "ok", "b", "ok"])
        assert app.focused is app.query(UserMessage).first()  # so that the arrows go on from there
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: mounted(app) == ["other", "ok"])
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: mounted(app) == ["a", "ok", "b", "ok"])
        await pilot.press("j")
        stage.answers["a"] = "again"
        await pilot.press("r")
        await until(pilot, lambda: mounted(app) == ["a", "again"] and not app.desk.answering)
        assert app.focused is app.query_one(Answer)
        await pilot.press("left")
        await until(pilot, lambda: mounted(app) == ["a", "ok", "b", "ok"])
        assert app.desk.talk.path[0].text == "a"


async def test_branch_arrows_by_click(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        stage.answers["a"] = "two"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["two"] and not app.desk.answering)
        await until(pilot, lambda: "◂ branch 2/2" in screen(app))  # where the click will find it
        await pilot.pause()
        head = app.query_one(Answer).head
        await pilot.click(head, offset=(str(head.content).index("◂"), 0))
        await until(pilot, lambda: answers(pilot) == ["ok"])


async def test_a_stopped_answer_goes_on_by_key_and_a_whole_one_does_not(app: ChatApp, stage: Any) -> None:
    stage.answers |= {"a": "abcdef"}
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "/set max_tokens=3")
        await ask(pilot, "a")
        stage.answers["abc"] = "def"
        app.query_one(Answer).focus()
        await pilot.press("c")
        await until(pilot, lambda: answers(pilot) == ["abcdef"] and not app.desk.answering)
        await pilot.press("escape")
        await ask(pilot, "/set max_tokens=30")
        await ask(pilot, "whole")
        app.query(Answer).last().focus()
        await pilot.press("c")
        await pilot.pause()
        assert not app.desk.answering
        assert len(stage.seen) == 3


async def test_y_copies_the_source_and_a_code_block_its_code(
    app: ChatApp, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_TTY", "x")
    stage.answers["a"] = "**bold** [/x]\n\n```py\nx = [1]\n```\n"
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await pilot.press("shift+tab", "y")
        await until(pilot, lambda: app.clipboard == stage.answers["a"])
        await until(pilot, lambda: "sent to the terminal" in screen(app))
        await pilot.press("tab", "y")  # to the code block in it
        await until(pilot, lambda: app.clipboard == "x = [1]\n")
        await pilot.press("tab")
        assert isinstance(app.focused, Prompt)
        await pilot.press("shift+tab", "y")
        await until(pilot, lambda: app.clipboard == stage.answers["a"])
        await ask(pilot, "/copy code")
        await until(pilot, lambda: app.clipboard == "x = [1]\n")


async def test_who_clicks_or_selects_goes_on_writing(app: ChatApp, stage: Any) -> None:
    """Letters are keys on a message: by chance, r would ask again."""
    stage.answers["a"] = "some words"
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        said = app.query_one(".said")
        await pilot.mouse_down(said, offset=(2, 0))
        await pilot.hover(app.query_one(Answer).body, offset=(6, 0))
        await pilot.mouse_up(app.query_one(Answer).body, offset=(6, 0))
        assert app.screen.get_selected_text()
        assert isinstance(app.focused, Prompt)
        await pilot.click(said)
        await pilot.click(app.query_one(Answer).head)
        await type_in(pilot, "re")
        assert prompt(pilot) == "re"
        assert stage.seen == ["\0a"]


@pytest.mark.parametrize("text", ["a[/x] b", "list[int]", "$foo $accent", "[@click=quit]y[/]"])
async def test_markup_is_text_everywhere(app: ChatApp, stage: Any, text: str) -> None:
    stage.answers[text] = text
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await ask(pilot, text)
        assert screen(app).count(text) >= 2  # as a prompt, and as an answer
        for message in app.desk.talk.path:
            message.label, message.model, message.attached = text, text, (text,)
            message.thinking = text
        await app.query_one(Transcript).show([], lambda _: (1, 1))
        await app.query_one(Transcript).show(app.desk.talk.path, lambda _: (2, 3))
        app.query_one(Answer).focus()
        await pilot.press("space")
        await until(pilot, lambda: f"with {text}" in screen(app))
        assert screen(app).count(text) >= 7
        assert screen(app).count("◂ branch 2/3 ▸") == 2


async def test_the_keys_that_do_nothing_are_not_offered(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await pilot.press("shift+tab")
        offered = {
            each.binding.action for each in app.screen.active_bindings.values() if each.node is app.focused
        }
        assert {"copy", "regenerate"} <= offered
        assert not {"edit", "go_on", "branch(-1)", "fold"} & offered
        await pilot.press("k")
        offered = {
            each.binding.action for each in app.screen.active_bindings.values() if each.node is app.focused
        }
        assert {"copy", "edit"} <= offered
        assert "regenerate" not in offered


async def test_an_empty_chat_offers_models_and_says_offline(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (
        listing.Entry(
            name=name, title="", size=size, here=size == 1000, partial=0, fit=None, licence="MIT", context=1,
            verified=True,
        )
        for name, size in (("mine[/x]", 1000), ("far", 2_000_000_000))
    )  # fmt: skip
    monkeypatch.setattr(listing, "suggestions", lambda fit, backend: [here, there])
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread)
    async with app.run_test(size=(80, 36)) as pilot:
        await until(pilot, lambda: "mine[/x]  here" in screen(app))
        assert "Ctrl+O chooses" in screen(app)
        assert "far  ↓ 2.0 GB  memory unknown" in screen(app)
        assert len(app.screen_stack) == 1
        await app.query_one(Transcript).clear("m", EngineConfig(backend="fake", offline=True))
        await until(pilot, lambda: "mine[/x]  here" in screen(app))
        assert "m  offline" in screen(app)
        assert "far" not in screen(app)
        await pilot.resize_terminal(40, 12)
        await until(pilot, lambda: "Type below" in screen(app))


async def test_models_that_cannot_be_listed_are_no_crash(
    app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fit: object, backend: str) -> None:
        raise ModelFileError("the card [/x] is broken")

    monkeypatch.setattr(listing, "suggestions", fail)
    async with app.run_test(size=(80, 36)) as pilot:
        await until(pilot, lambda: "the card [/x] is broken" in screen(app))
