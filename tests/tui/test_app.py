"""The chat screen: streaming, errors, sizes; a scripted engine in a thread behind it."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from typing import Any

import pytest
from textual.widgets import Static

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ModelNotFoundError
from ferrum_mlx.messages import Ready
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Failure, Remark, Welcome
from ferrum_tui.prompt import Prompt
from ferrum_tui.status import StatusLine, TitleBar

from .driver import GREEDY, answers, below, blocks, prompt, ready, screen, state, type_in, until


async def test_answer_is_streamed_and_kept(app: ChatApp, stage: Any) -> None:
    stage.answers["hi"] = "Hello **you**.\n\n1. one\n2. two\n"
    stage.held = True
    async with app.run_test() as pilot:
        await ready(pilot)
        assert app.query(Welcome)
        await type_in(pilot, "hi")
        await pilot.press("enter")
        assert prompt(pilot) == ""
        await until(pilot, lambda: state(pilot) == "prefill")
        stage.allow(5)
        await until(pilot, lambda: answers(pilot) == ["Hello"])
        await until(pilot, lambda: state(pilot) == "generating")
        stage.release()
        stage.allow(100)
        await ready(pilot)
        assert answers(pilot) == [stage.answers["hi"]]
        assert "31 tok" in below(pilot)  # the end-of-sequence token is one, too
        status = app.query_one(StatusLine).status
        assert status.tokens == 31
        assert status.ttft_s is not None
        assert blocks(app) == 0
        assert not app.query(Welcome)
        assert "Hello you." in screen(app)


async def test_history_reaches_the_engine_and_a_new_chat_forgets_it(app: ChatApp, stage: Any) -> None:
    stage.answers |= {"a": "A", "b": "B"}
    async with app.run_test() as pilot:
        await ready(pilot)
        for key in "ab":
            await pilot.press(key, "enter")
            await until(pilot, lambda key=key: key.upper() in answers(pilot))  # type: ignore[misc]
            await ready(pilot)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: bool(app.query(Welcome)))
        assert not app.query(Answer)
        await pilot.press("c", "enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
    assert stage.seen == ["\0a", "\0a\0A\0b", "\0c"]


async def test_system_message_opens_every_conversation(stage: Any) -> None:
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, "be kind", EngineClient.in_thread)
    async with app.run_test() as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
    assert stage.seen == ["\0be kind\0a"]


async def test_prompt_sent_while_loading_is_answered_when_ready(app: ChatApp, stage: Any) -> None:
    stage.may_build.clear()
    async with app.run_test() as pilot:
        await until(pilot, lambda: "loading the script" in screen(app))
        await type_in(pilot, "early")
        await pilot.press("enter")
        await type_in(pilot, "more")
        assert [str(part.content) for part in app.query(".said").results(Static)] == ["early"]
        stage.may_build.set()
        await until(pilot, lambda: answers(pilot) == ["ok"])
        assert prompt(pilot) == "more"


async def test_failed_request_is_an_inline_block_and_the_prompt_comes_back(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        app.query_one(Prompt).put("x" * 5000)
        await pilot.press("enter")
        await until(pilot, lambda: bool(app.query(Failure)))
        shown = str(app.query_one(Failure).content)
        assert "5001 tokens" in shown
        assert "--max-model-len" in shown
        assert prompt(pilot) == "x" * 5000
        await ready(pilot)


async def test_engine_that_dies_mid_answer_is_replaced_and_no_text_is_lost(app: ChatApp, stage: Any) -> None:
    stage.answers["go"] = "some words that come"
    stage.held = True
    stage.allow(10)
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["some words"])
        stage.crash = RuntimeError("[METAL] [/b] out of memory")
        stage.release()
        await until(pilot, lambda: bool(app.query(Failure)))
        assert "[METAL] [/b] out of memory" in str(app.query_one(Failure).content)
        assert answers(pilot)[0].startswith("some words")
        assert "broken off" in below(pilot)
        await until(pilot, lambda: stage.builds == 2)  # the turn fails before the engine is replaced
        await ready(pilot)
        assert len(app.query(Failure)) == 1
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == [stage.answers["go"]])
        assert "branch 2/2" in screen(app)  # what came of the first is branch 1


async def test_engine_that_dies_before_the_screen_takes_it_up_is_not_called_ready(
    app: ChatApp,
) -> None:
    start = app.host.client.start

    def start_and_die() -> Ready:
        announced = start()
        app.host.client._dispatch(app.host.client._life, [died("killed at once")])
        return announced

    patch = pytest.MonkeyPatch()
    patch.setattr(app.host.client, "start", start_and_die)
    async with app.run_test() as pilot:
        await until(pilot, lambda: state(pilot) == "failed")
        await until(pilot, lambda: "killed at once" in screen(app))
        patch.undo()
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
        assert len(app.query(Failure)) == 1


async def test_launch_without_disk_is_told_and_enter_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    app = ChatApp(EngineConfig(backend="fake"), GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", full)
        async with app.run_test() as pilot:
            await until(pilot, lambda: state(pilot) == "failed")
            assert "No space left on device" in str(app.query_one(Failure).content)
            patch.undo()
            await pilot.press("enter")
            await ready(pilot)


async def test_engine_that_dies_idle_is_told_and_replaced(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "draft")
        app.host.client._dispatch(app.host.client._life, [died("killed by a test")])
        await until(pilot, lambda: bool(app.query(Failure)))
        await until(pilot, lambda: stage.builds == 2)
        await ready(pilot)
        assert prompt(pilot) == "draft"
        await until(pilot, lambda: "killed by a test" in screen(app))


def died(what: str) -> Any:
    from ferrum_mlx.errors import EngineDiedError
    from ferrum_mlx.messages import Died

    return Died(EngineDiedError(what))


async def test_engine_that_cannot_start_says_why_and_is_tried_again(app: ChatApp, stage: Any) -> None:
    stage.build_error = ModelNotFoundError("no model [/x]", next_step="try ferrum-mlx models list")
    async with app.run_test() as pilot:
        await until(pilot, lambda: state(pilot) == "failed")
        assert "no model [/x]" in str(app.query_one(Failure).content)
        await until(pilot, lambda: "models list" in screen(app))
        await type_in(pilot, "now")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])


async def test_failed_start_gives_a_waiting_prompt_back(app: ChatApp, stage: Any) -> None:
    stage.may_build.clear()
    stage.build_error = ModelNotFoundError("gone")
    async with app.run_test() as pilot:
        await type_in(pilot, "early")
        await pilot.press("enter")
        await until(pilot, lambda: bool(app.query(Answer)))
        stage.may_build.set()
        await until(pilot, lambda: state(pilot) == "failed")
        await until(pilot, lambda: prompt(pilot) == "early")
        assert not app.query(Answer)  # of which no word came


async def test_notes_and_backend_are_shown(app: ChatApp, stage: Any) -> None:
    stage.notes = ("the context is cut to 4,096 [tokens]",)
    async with app.run_test() as pilot:
        await ready(pilot)
        await until(pilot, lambda: bool(app.query(Remark)))
        await until(pilot, lambda: "4,096 [tokens]" in screen(app))
        assert "fake" in app.query_one(TitleBar).where


async def test_notes_of_an_engine_at_work_are_shown(app: ChatApp) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        assert app.host.client.on_note is not None
        await asyncio.to_thread(app.host.client.on_note, "the disk is [full]")
        await until(pilot, lambda: bool(app.query(Remark)))
        await until(pilot, lambda: "note: the disk is [full]" in screen(app))


async def test_control_codes_never_reach_the_screen(app: ChatApp, stage: Any) -> None:
    stage.answers["esc"] = "\x1b[2Jred\x07 \x9b31m\ttab [b]x[/b]"
    async with app.run_test() as pilot:
        await ready(pilot)
        app.query_one(Prompt).put("esc")
        await pilot.press("enter")
        await until(pilot, lambda: len(answers(pilot)) == 1 and "tab" in answers(pilot)[0])
        await ready(pilot)
        app.query_one(Prompt).put("\x1b]0;title\x07mine")
        await pilot.press("enter")
        await until(pilot, lambda: len(answers(pilot)) == 2)
        assert not any(code in screen(app) for code in "\x1b\x07\x9b")
        assert "[2Jred" in answers(pilot)[0]
    assert stage.seen[1].endswith("\x1b]0;title\x07mine")  # what is sent is what was written


@pytest.mark.parametrize("size", [(40, 12), (20, 8), (200, 60)])
@pytest.mark.parametrize("no_color", [False, True])
async def test_any_size_and_no_color(
    stage: Any, size: tuple[int, int], no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stage.answers["a"] = "# Title\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    app = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread)
    async with app.run_test(size=size, notifications=True) as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        await until(pilot, lambda: answers(pilot) == [stage.answers["a"]])
        await pilot.press("f1", "escape")
        await pilot.resize_terminal(60, 15)
        await pilot.pause()
        assert "ferrum" in screen(app)


async def test_narrow_status_keeps_the_state(app: ChatApp) -> None:
    async with app.run_test(size=(40, 12)) as pilot:
        await ready(pilot)
        assert "○ ready" in screen(app)
