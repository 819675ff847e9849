"""Messages on screen: keys on them, long conversations, following and scrolling."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from ferrum_mlx.chat.conversation import Conversation
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.block import CodeBlock
from ferrum_tui.message import MessageWidget, UserMessage
from ferrum_tui.prompt import Prompt
from ferrum_tui.transcript import Transcript

from .driver import answers, prompt, ready, screen, state, type_in, until

SIZE = (80, 30)


async def ask(pilot: Pilot[Any], text: str) -> None:
    await type_in(pilot, text)
    await pilot.press("enter")
    await pilot.pause()
    await until(pilot, lambda: not pilot.app.desk.answering and state(pilot) == "ready")


def long_conversation(turns: int) -> Conversation:
    conversation = Conversation(title="long")
    leaf = None
    for turn in range(turns):
        leaf = conversation.add("user", f"question {turn}", parent=leaf).id
        answer = conversation.add("assistant", f"answer {turn}", parent=leaf)
        answer.ending, answer.model, leaf = "stop", "m", answer.id
    conversation.leaf = leaf
    return conversation


def mounted(app: ChatApp) -> list[str]:
    return [widget.message.text for widget in app.query(MessageWidget)]


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
        app.query(Answer).first().focus()
        stage.answers["a"] = "again"
        await pilot.press("r")
        await until(pilot, lambda: mounted(app) == ["a", "again"])
        assert app.desk.talk.path[0].text == "a"


async def test_branch_arrows_by_click(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        stage.answers["a"] = "two"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["two"] and not app.desk.answering)
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
        app.query_one(CodeBlock).focus()
        await pilot.press("y")
        await until(pilot, lambda: app.clipboard == "x = [1]\n")
        app.query_one(Answer).focus()
        await pilot.press("y")
        await until(pilot, lambda: app.clipboard == stage.answers["a"])
        await until(pilot, lambda: "does not say" in screen(app))
        app.query_one(Prompt).focus()
        await ask(pilot, "/copy code")
        await until(pilot, lambda: app.clipboard == "x = [1]\n")


async def test_only_the_end_of_a_long_conversation_is_mounted_and_the_rest_comes_by_scrolling(
    app: ChatApp,
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await app.open(long_conversation(50))
        await pilot.pause()
        assert mounted(app) == [f"{kind} {turn}" for turn in range(40, 50) for kind in ("question", "answer")]
        assert "answer 49" in screen(app)
        transcript = app.query_one(Transcript)
        for seen in (40, 30, 20, 10):
            while mounted(app)[0] == f"question {seen}":
                await pilot.press("pageup")
                await pilot.pause(0.05)
            await until(pilot, lambda seen=seen: f"question {seen}" in screen(app))  # type: ignore[misc]
            assert mounted(app)[0] == f"question {seen - 10}"
            assert transcript.scroll_y > 0
            assert "new line" not in screen(app)
        for _ in range(40):
            await pilot.press("pageup")
        assert "question 0" in screen(app)
        assert len(mounted(app)) == 100
        await pilot.press("ctrl+end")
        await until(pilot, lambda: "answer 49" in screen(app))


async def test_a_chat_that_goes_on_keeps_few_mounted(app: ChatApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await app.open(long_conversation(50))
        for turn in range(15):
            await ask(pilot, f"more {turn}")
        assert len(mounted(app)) <= 60  # two screens of short ones
        assert mounted(app)[-2:] == ["more 14", "ok"]
        await pilot.press("shift+tab", "left")  # no branches: nothing happens
        assert len(app.desk.talk.path) == 130


async def test_what_is_looked_at_stays_and_new_lines_are_counted(app: ChatApp, stage: Any) -> None:
    stage.answers["long"] = "".join(f"Line {i}.\n\n" for i in range(80))
    stage.held = True
    stage.allow(400)
    async with app.run_test(size=(60, 20)) as pilot:
        await ready(pilot)
        await type_in(pilot, "long")
        await pilot.press("enter")
        transcript = app.query_one(Transcript)
        await until(pilot, lambda: transcript.max_scroll_y > 30 and transcript.is_vertical_scroll_end)
        assert not transcript.border_subtitle
        await pilot.press("pageup")
        await until(pilot, lambda: "End follows" in screen(app))
        before = transcript.scroll_offset.y
        looked_at = [line[1:-4] for line in screen(app).splitlines()[2:8]]
        stage.release()
        stage.allow(1000)
        await until(pilot, lambda: not app.desk.answering)
        assert transcript.scroll_offset.y == before
        assert [line[1:-4] for line in screen(app).splitlines()[2:8]] == looked_at
        count = int(str(transcript.border_subtitle).split()[1])
        assert count > 50
        await pilot.press("end")  # the prompt is empty
        await until(pilot, lambda: transcript.is_vertical_scroll_end and not transcript.border_subtitle)
        assert "Line 79." in screen(app)


async def test_walking_keeps_what_is_the_same(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "b")
        first = app.query(UserMessage).first()
        stage.answers["b"] = "other"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: mounted(app) == ["a", "ok", "b", "other"])
        assert app.query(UserMessage).first() is first
