"""The chat screen: keys, streaming, stopping, errors; a scripted engine in a thread behind it."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Markdown, Static

from ferrum_mlx.client import EngineClient, RequestStream
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ModelNotFoundError
from ferrum_mlx.messages import Ready
from ferrum_mlx.sampling import SamplingParams
from ferrum_tui.app import ChatApp
from ferrum_tui.help import HelpScreen
from ferrum_tui.prompt import Prompt
from ferrum_tui.status import StatusLine, TitleBar
from ferrum_tui.transcript import Answer, Failure, Remark, Transcript, UserMessage, Welcome

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
        assert status.kv is not None
        assert status.kv.used_blocks == 0
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
    app = ChatApp(EngineConfig(backend="fake"), SamplingParams(), "be kind", EngineClient.in_thread)
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
        await until(pilot, lambda: "KV 0/" in screen(app))
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
        app.set_keymap({"prompt.send": "ctrl+s", "prompt.newline": "enter"})
        await pilot.press("a", "enter", "b", "ctrl+s")
        await until(pilot, lambda: answers(pilot) == ["ok"])
    assert stage.seen == ["\0a\nb"]


def stream_of(app: ChatApp) -> RequestStream:
    assert app._turn is not None
    assert app._turn.stream is not None
    return app._turn.stream


async def test_a_new_chat_ends_the_answer_that_comes(app: ChatApp, stage: Any) -> None:
    stage.answers["go"] = "word " * 400
    stage.held = True
    stage.allow(10)
    async with app.run_test() as pilot:
        await ready(pilot)
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: "KV 1/" in screen(app))
        await until(pilot, lambda: answers(pilot) == ["word word "])
        stream = stream_of(app)  # held, so that it is closed and not only dropped
        await pilot.press("ctrl+n")
        assert stream.ended
        assert not app.query(Answer)
        stage.allow(1)
        await until(pilot, lambda: "KV 0/" in screen(app))
        assert app._client.last_step is not None
        assert app._client.last_step.running == 0
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
        assert "Ctrl+N" in screen(app)
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
        assert prompt(pilot) == "go"
        await ready(pilot)
        assert stage.builds == 2
        assert len(app.query(Failure)) == 1
        await pilot.press("enter")
        await until(pilot, lambda: len(answers(pilot)) == 2 and answers(pilot)[1] == stage.answers["go"])


async def test_engine_that_dies_before_the_screen_takes_it_up_is_not_called_ready(
    app: ChatApp,
) -> None:
    start = app._client.start

    def start_and_die() -> Ready:
        announced = start()
        app._client._dispatch(app._client._life, [died("killed at once")])
        return announced

    patch = pytest.MonkeyPatch()
    patch.setattr(app._client, "start", start_and_die)
    async with app.run_test() as pilot:
        await until(pilot, lambda: state(pilot) == "failed")
        assert "killed at once" in screen(app)
        patch.undo()
        await type_in(pilot, "go")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
        assert len(app.query(Failure)) == 1


async def test_launch_without_disk_is_told_and_enter_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    app = ChatApp(EngineConfig(backend="fake"), SamplingParams())
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
        app._client._dispatch(app._client._life, [died("killed by a test")])
        await until(pilot, lambda: bool(app.query(Failure)))
        await until(pilot, lambda: stage.builds == 2)
        await ready(pilot)
        assert prompt(pilot) == "draft"
        assert "killed by a test" in screen(app)


def died(what: str) -> Any:
    from ferrum_mlx.errors import EngineDiedError
    from ferrum_mlx.messages import Died

    return Died(EngineDiedError(what))


async def test_engine_that_cannot_start_says_why_and_is_tried_again(app: ChatApp, stage: Any) -> None:
    stage.build_error = ModelNotFoundError("no model [/x]", next_step="try ferrum-mlx models list")
    async with app.run_test() as pilot:
        await until(pilot, lambda: state(pilot) == "failed")
        assert "no model [/x]" in str(app.query_one(Failure).content)
        assert "models list" in screen(app)
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
        assert "4,096 [tokens]" in screen(app)
        assert "fake" in app.query_one(TitleBar).where


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


async def test_scrolling_up_stays_and_ctrl_end_follows_again(app: ChatApp, stage: Any) -> None:
    stage.answers["long"] = "".join(f"Line {i}.\n\n" for i in range(80))
    stage.held = True
    stage.allow(400)
    async with app.run_test(size=(60, 20)) as pilot:
        await ready(pilot)
        await type_in(pilot, "long")
        await pilot.press("enter")
        transcript = app.query_one(Transcript)
        await until(pilot, lambda: transcript.max_scroll_y > 30 and transcript.is_vertical_scroll_end)
        await pilot.press("pageup", "pageup")
        place = transcript.scroll_offset.y
        assert place < transcript.max_scroll_y
        stage.release()
        stage.allow(1000)
        await ready(pilot)
        assert transcript.scroll_offset.y == place
        await pilot.press("ctrl+end")
        await until(pilot, lambda: transcript.is_vertical_scroll_end)
        assert "Line 79." in screen(app)


async def test_many_messages_stay_bounded(app: ChatApp, stage: Any) -> None:
    async with app.run_test() as pilot:
        await ready(pilot)
        transcript = app.query_one(Transcript)
        for _ in range(80):
            await transcript.add(Remark("one more"))
        assert len(transcript.children) == 61
        assert "earlier messages" in str(transcript.query(Remark).first().content)


@pytest.mark.parametrize("size", [(40, 12), (20, 8), (200, 60)])
@pytest.mark.parametrize("no_color", [False, True])
async def test_any_size_and_no_color(
    stage: Any, size: tuple[int, int], no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stage.answers["a"] = "# Title\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    app = ChatApp(EngineConfig(backend="fake"), SamplingParams(), make_client=EngineClient.in_thread)
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
        assert "KV 0/1,024" in screen(app)


async def test_quitting_while_the_model_loads(app: ChatApp, stage: Any) -> None:
    stage.may_build.clear()
    async with app.run_test() as pilot:
        await until(pilot, lambda: stage.builds == 1)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running)
        stage.may_build.set()
