"""Keys of the chat screen: writing, stopping, scrolling, help, quitting; a scripted engine behind it."""

from __future__ import annotations

from typing import Any

import pytest
from textual.widgets._footer import FooterKey

from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.key_row import KeyRow
from ferrum_tui.message import UserMessage
from ferrum_tui.notices import Remark
from ferrum_tui.prompt import Prompt
from ferrum_tui.screens.help import HelpScreen
from ferrum_tui.transcript import Transcript

from .driver import answers, below, blocks, prompt, ready, screen, state, stream_of, type_in, until


@pytest.mark.parametrize(("opens", "first"), [("", "⏎ Send"), ("f2", "esc Cancel")])
async def test_the_row_of_keys_has_whole_ones_only(opens: str, first: str, app: ChatApp) -> None:
    async with app.run_test(size=(150, 24)) as pilot:
        await ready(pilot)
        if opens:
            await pilot.press(opens)
            await until(pilot, lambda: len(app.screen_stack) == 2)
        row = app.screen.query_one(KeyRow)
        await until(pilot, lambda: bool(row.query(FooterKey)))
        labels = [f"{key.key_display} {key.description}" for key in row.query(FooterKey)]
        counts = []
        for width in (150, 40, 20, 150):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            last = screen(app).splitlines()[-1]
            assert last.strip().startswith(first)
            counts.append(sum(label in last for label in labels))
            for label in labels:
                last = last.replace(label, "")
            assert last.strip(" ▏") == ""  # a part of a label would be left
        assert counts[0] == counts[-1] == len(labels)
        assert counts[-2] < len(labels)


async def test_esc_stands_behind_enter_while_it_stops(app: ChatApp, stage: Any) -> None:
    stage.held = True
    async with app.run_test(size=(40, 12)) as pilot:
        await ready(pilot)
        await type_in(pilot, "a")
        await pilot.press("enter")
        await until(pilot, lambda: "⏎ Send  esc Stop" in screen(app).splitlines()[-1])
        stage.release()


async def test_newlines_and_enter(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("enter")
        assert not app.query(UserMessage)
        await pilot.press("space", "ctrl+j", "enter")
        assert not app.query(UserMessage)
        assert prompt(pilot) == " \n"
        app.query_one(Prompt).put("")
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert prompt(pilot) == "a\nb\nc\nd"
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
    assert stage.seen == ["\0a\nb\nc\nd"]


async def test_what_is_sent_keeps_its_indentation(app: ChatApp, stage: Any) -> None:
    code = "    if x:\n        pass\n"
    async with app.run_test() as pilot:
        await ready(pilot)
        app.query_one(Prompt).put(code)
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
        await pilot.press("up")
        assert prompt(pilot) == code
    assert stage.seen == ["\0" + code]


async def test_up_and_down_walk_through_what_was_sent(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        for text in ("first", "second\nline"):
            await type_in(pilot, text)
            await pilot.press("enter")
            await pilot.pause()
            await ready(pilot)
        await type_in(pilot, "draft")
        await pilot.press("up")
        assert prompt(pilot) == "second\nline"
        await pilot.press("up")
        assert prompt(pilot) == "second\nline"  # a move inside the text, not in history
        await pilot.press("up")
        assert prompt(pilot) == "first"
        await pilot.press("up")
        assert prompt(pilot) == "first"
        await pilot.press("down", "down")
        assert prompt(pilot) == "draft"


async def test_esc_keeps_a_partial_answer_marked_stopped(app: ChatApp, stage: Any) -> None:
    stage.answers["go"] = "word " * 400
    stage.held = True
    stage.allow(10)
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["word word "])
        await pilot.press("escape")
        stage.allow(1)
        await until(pilot, lambda: "stopped" in below(pilot))
        assert answers(pilot)[0].startswith("word word")
        await until(pilot, lambda: blocks(app) == 0)
        stage.release()
        await type_in(pilot, "on")
        await pilot.press("enter")
        await until(pilot, lambda: len(answers(pilot)) == 2 and answers(pilot)[1] == "ok")
    assert stage.seen[1].startswith("\0go\0word word")


async def test_esc_before_the_first_token_gives_the_prompt_back(app: ChatApp, stage: Any) -> None:
    stage.held = True
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "oops")
        await pilot.press("enter")
        await until(pilot, lambda: state(pilot) == "prefill")
        stream = stream_of(app)
        await pilot.press("escape")
        assert stream.ended
        assert prompt(pilot) == "oops"
        assert not app.query(UserMessage)
        assert not app.query(Answer)
        stage.release()
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])


async def test_sending_while_an_answer_comes_keeps_the_draft(app: ChatApp, stage: Any) -> None:
    stage.held = True
    async with app.run_test(notifications=True) as pilot:
        await ready(pilot)
        await pilot.press("a", "enter", "b", "enter")
        await until(pilot, lambda: "still coming" in screen(app))
        assert prompt(pilot) == "b"
        assert len(app.query(UserMessage)) == 1
        stage.release()


async def test_ctrl_c_stops_then_quits_at_the_second(app: ChatApp, stage: Any) -> None:
    stage.held = True
    async with app.run_test(notifications=True) as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        await until(pilot, lambda: state(pilot) == "prefill")
        await pilot.press("ctrl+c")
        assert not app.query(Answer)
        stage.release()
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "again quits" in screen(app))
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_copies_a_selection(app: ChatApp) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "copy me")
        app.query_one(Prompt).select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "copy me"
        assert app.is_running


async def test_ctrl_d_quits_on_an_empty_prompt_only(app: ChatApp) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("a", "home", "ctrl+d")
        assert prompt(pilot) == ""
        assert app.is_running
        await pilot.press("ctrl+d")
        await until(pilot, lambda: not app.is_running)


async def test_keys_of_the_prompt_can_be_remapped(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        app.set_keymap({"prompt.send": "ctrl+y", "prompt.newline": "enter"})
        await pilot.press("a", "enter", "b", "ctrl+y")
        await until(pilot, lambda: answers(pilot) == ["ok"])
    assert stage.seen == ["\0a\nb"]


async def test_a_new_chat_ends_the_answer_that_comes(app: ChatApp, stage: Any) -> None:
    stage.answers["go"] = "word " * 400
    stage.held = True
    stage.allow(10)
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: blocks(app) == 1)
        await until(pilot, lambda: answers(pilot) == ["word word "])
        stream = stream_of(app)  # held, so that it is closed and not only dropped
        await pilot.press("ctrl+n")
        assert stream.ended
        assert not app.query(Answer)
        stage.allow(1)
        await until(pilot, lambda: blocks(app) == 0)
        assert app.host.client.last_step is not None
        assert app.host.client.last_step.running == 0
        assert state(pilot) == "ready"


async def test_help_scrolls_on_a_small_screen_and_the_chat_below_does_not_move(app: ChatApp) -> None:
    async with app.run_test(size=(40, 12)) as pilot:
        await ready(pilot)
        for i in range(20):
            await app.query_one(Transcript).add(Remark(f"remark {i}"))
        app.query_one(Transcript).follow()
        await pilot.pause()
        below = app.query_one(Transcript).scroll_offset.y
        await pilot.press("f1")
        await pilot.pause()
        box = app.screen.query_one("#help")
        await pilot.press("pagedown")
        await until(pilot, lambda: box.scroll_offset.y > 0)
        await pilot.press("pageup", "ctrl+n")
        await until(pilot, lambda: box.scroll_offset.y == 0)
        await pilot.press("escape")
        assert app.query_one(Transcript).scroll_offset.y == below
        assert len(app.query(Remark)) == 20


async def test_help_and_commands(app: ChatApp) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        assert "^n" in screen(app)
        await pilot.press("pageup", "ctrl+c")  # keys of the screen below do no harm
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)
        await type_in(pilot, "/help")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await type_in(pilot, "/quit")
        await pilot.press("enter")
        await until(pilot, lambda: not app.is_running)


async def test_quitting_while_the_model_loads(app: ChatApp, stage: Any) -> None:
    stage.may_build.clear()
    async with app.run_test() as pilot:
        await until(pilot, lambda: stage.builds == 1)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running)
        stage.may_build.set()
