"""The transcript: long conversations, following and scrolling, what stays when branches are walked."""

from __future__ import annotations

from typing import Any

from textual.events import MouseScrollUp

from ferrum_tui.app import ChatApp
from ferrum_tui.message import MessageWidget, UserMessage
from ferrum_tui.transcript import Transcript

from .conversing import SIZE, ask, long_conversation, mounted
from .driver import answers, ready, screen, type_in, until


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
        for _ in range(8):
            await pilot.press("pageup")
        await until(pilot, lambda: "question 0" in screen(app))
        assert len(mounted(app)) == 100
        await pilot.press("ctrl+end")
        await until(pilot, lambda: "answer 49" in screen(app))


async def test_a_chat_that_goes_on_keeps_few_mounted(app: ChatApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await app.open(long_conversation(50))
        for turn in range(6):
            await ask(pilot, f"more {turn}")
        assert len(mounted(app)) <= 60  # two screens of short ones
        assert mounted(app)[-2:] == ["more 5", "ok"]
        await pilot.press("shift+tab", "left")  # no branches: nothing happens
        assert len(app.desk.talk.path) == 112


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


async def test_home_the_wheel_and_k_bring_earlier_messages_too(app: ChatApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await app.open(long_conversation(35))
        await pilot.pause()
        transcript = app.query_one(Transcript)
        app.query(MessageWidget).first().focus()
        await pilot.press("k")
        await until(pilot, lambda: mounted(app)[0] == "question 15")
        await until(pilot, lambda: app.focused is list(app.query(MessageWidget))[19])
        await pilot.press("home")
        await until(pilot, lambda: mounted(app)[0] == "question 5")
        await until(pilot, lambda: transcript.scroll_y > 0)
        transcript.scroll_to(y=1, animate=False)
        await pilot.pause()
        for _ in range(3):
            await pilot._post_mouse_events([MouseScrollUp], widget=transcript, button=0)
        await until(pilot, lambda: mounted(app)[0] == "question 0")


async def test_earlier_messages_fill_a_tall_screen(app: ChatApp) -> None:
    async with app.run_test(size=(80, 90)) as pilot:
        await ready(pilot)
        await app.open(long_conversation(35))
        await until(pilot, lambda: len(mounted(app)) == 40)
        assert "answer 34" in screen(app)


async def test_branches_walked_while_earlier_messages_come(app: ChatApp) -> None:
    conversation = long_conversation(50)
    first = conversation.path(conversation.leaf)
    other = conversation.add("user", "another", parent=first[60].id)
    async with app.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await app.open(conversation)
        await pilot.pause()
        talk, transcript = app.desk.talk, app.query_one(Transcript)
        for leaf in (other.id, first[-1].id, first[1].id, first[-1].id):
            transcript.scroll_to(y=0, animate=False)
            await pilot.press("pageup")
            await talk.go_to(leaf)
            await pilot.press("pageup")
        await pilot.pause(0.1)
        shown = [message.text for message in talk.path]
        assert mounted(app) == shown[-len(mounted(app)) :]


async def test_a_page_down_at_the_end_does_not_end_the_following(app: ChatApp, stage: Any) -> None:
    stage.answers["a"] = "".join(f"Line {i}.\n\n" for i in range(60))
    stage.held = True
    stage.allow(300)
    async with app.run_test(size=(60, 20)) as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        transcript = app.query_one(Transcript)
        await until(pilot, lambda: transcript.max_scroll_y > 20 and transcript.is_vertical_scroll_end)
        await pilot.press("pagedown", "pagedown")
        stage.release()
        stage.allow(1000)
        await until(pilot, lambda: not app.desk.answering)
        await until(pilot, lambda: "Line 59." in screen(app))
        assert not transcript.border_subtitle


async def test_a_resize_and_a_theme_while_words_come(app: ChatApp, stage: Any) -> None:
    stage.answers["a"] = "".join(f"Line {i} of some [words] that wrap.\n\n" for i in range(40))
    stage.held = True
    stage.allow(600)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(pilot)
        await pilot.press("a", "enter")
        transcript = app.query_one(Transcript)
        await until(pilot, lambda: transcript.max_scroll_y > 10)
        await pilot.resize_terminal(40, 12)
        await until(pilot, lambda: transcript.is_vertical_scroll_end)
        await pilot.press("pageup")
        await until(pilot, lambda: "End follows" in screen(app))
        app.theme = "textual-light"
        await pilot.resize_terminal(70, 20)
        stage.allow(100)
        await pilot.pause(0.1)
        app.theme = "ansi-dark"
        stage.release()
        stage.allow(2000)
        await until(pilot, lambda: not app.desk.answering)
        await pilot.press("end")
        await until(pilot, lambda: "Line 39 of some [words]" in screen(app))
        assert answers(pilot) == [stage.answers["a"]]
