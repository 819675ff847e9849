"""What stays of an answer that is ended before its time: by a key, a command, a failure, or a quit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError
from ferrum_tui.answer import Answer
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Failure, Welcome
from ferrum_tui.prompt import Prompt

from .conversing import SIZE, ask, mounted
from .driver import GREEDY, answers, below, prompt, ready, screen, state, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def chat(stage: Any, path: Path) -> ChatApp:
    return resumed(Store(path), None)


def resumed(store: Store, conversation: Conversation | None) -> ChatApp:
    return ChatApp(
        EngineConfig(backend="fake"),
        GREEDY,
        make_client=EngineClient.in_thread,
        store=store,
        conversation=conversation,
    )


async def send(pilot: Pilot[ChatApp], stage: Any, text: str, tokens: int) -> None:
    """Send a prompt, of whose answer so many tokens come and no more."""
    stage.held = True
    if tokens:
        stage.allow(tokens)
    pilot.app.prompt.put(text)
    await pilot.press("enter")
    await until(pilot, lambda: state(pilot) == "prefill" if not tokens else came(pilot.app) == tokens)


def came(app: ChatApp) -> int:
    assert app.desk.talk.turn is not None
    return app.desk.talk.turn.tokens


async def another_model(pilot: Pilot[ChatApp], stage: Any) -> None:
    app = pilot.app
    before = app.host
    app.prompt.post_message(Prompt.Sent("/model some/other"))  # a key press would wait for the engine's end
    await until(pilot, lambda: app.host is not before)
    stage.release()
    await until(pilot, lambda: app.host.state == "ready")


def said(app: ChatApp) -> list[str]:
    return [message.text for message in app.desk.talk.path]


def kept(path: Path) -> list[str]:
    """The path that a resume would show."""
    store = Store(path)
    number = store.latest()
    assert number is not None
    conversation = store.load(number)
    store.close()
    return [message.text for message in conversation.path(conversation.leaf)]


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_second_answer_is_there_after_quitting(
    chat: ChatApp, stage: Any, path: Path, tokens: int
) -> None:
    stage.answers["b"] = "second answer"
    async with chat.run_test() as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await send(pilot, stage, "b", tokens)
        assert kept(path)[:3] == ["a", "ok", "b"]  # what a kill -9 would leave
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not chat.is_running)
        stage.release()
    assert kept(path) == ["a", "ok", "b", "second answer"[:tokens]][: 4 if tokens else 3]


async def killed_before_the_first_token(chat: ChatApp, stage: Any) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await send(pilot, stage, "b", 0)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not chat.is_running)
        stage.release()


def latest(path: Path) -> ChatApp:
    store = Store(path)
    number = store.latest()
    assert number is not None
    return resumed(store, store.load(number))


@pytest.mark.parametrize(("key", "asks", "branches"), [("ctrl+r", "b", 1), ("enter", "c", 2)])
async def test_a_prompt_of_which_nothing_came_waits_for_an_answer_or_another_prompt(
    chat: ChatApp, stage: Any, path: Path, key: str, asks: str, branches: int
) -> None:
    await killed_before_the_first_token(chat, stage)
    again = latest(path)
    async with again.run_test(size=SIZE) as pilot:
        await ready(pilot)
        assert mounted(again) == kept(path) == ["a", "ok", "b"]
        await until(pilot, lambda: "This prompt has no answer yet: Ctrl+R answers it" in screen(again))
        again.prompt.put("c" if key == "enter" else "")
        await pilot.press(key)
        await until(pilot, lambda: mounted(again) == ["a", "ok", asks, "ok"] and not again.desk.answering)
        assert stage.seen[-1] == f"\0a\0ok\0{asks}"
        assert "no answer yet" not in screen(again)
        conversation = again.desk.talk.book.conversation
        assert len(conversation.siblings(again.desk.talk.path[2].id)) == branches
    assert kept(path) == ["a", "ok", asks, "ok"]
    assert "b" in [message.text for message in latest(path).desk.talk.book.conversation.messages.values()]


async def test_another_model_keeps_what_has_come(chat: ChatApp, stage: Any, path: Path) -> None:
    stage.answers["b"] = "second answer"
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await send(pilot, stage, "b", 3)
        await another_model(pilot, stage)
        assert "■ stopped" in below(pilot)
        assert answers(pilot) == ["ok", "sec"]
        assert kept(path) == said(chat) == ["a", "ok", "b", "sec"]
        await ask(pilot, "c")
        assert stage.seen[-1] == "\0a\0ok\0b\0sec\0c"


# With one token it is half a character, which is no answer either.
@pytest.mark.parametrize(
    ("by", "tokens"), [("another model", 0), ("another model", 1), ("a new chat", 0), ("escape", 1)]
)
async def test_before_the_first_word_the_prompt_is_a_draft_again(
    by: str, tokens: int, chat: ChatApp, stage: Any, path: Path
) -> None:
    stage.answers["b"] = "é"
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await send(pilot, stage, "b", tokens)
        if by == "another model":
            await another_model(pilot, stage)
        else:
            await pilot.press("ctrl+n" if by == "a new chat" else "escape")
            stage.release()
        await until(pilot, lambda: prompt(pilot) == "b" and not chat.desk.answering)
        before = [] if by == "a new chat" else ["a", "ok"]
        assert kept(path) == ["a", "ok"]
        assert mounted(chat) == said(chat) == before
        await pilot.press("enter")
        await until(pilot, lambda: said(chat) == [*before, "b", "é"] and not chat.desk.answering)
        seen = "".join(f"\0{text}" for text in [*before, "b"])
        assert stage.seen[-1] == seen
        await pilot.press("shift+tab", "r")  # what is on screen is in the book
        await until(pilot, lambda: len(stage.seen) == 4 and not chat.desk.answering)
        assert stage.seen[-1] == seen


async def test_an_answer_that_is_being_drawn_stays_in_its_chat(
    chat: ChatApp, stage: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, add = asyncio.Event(), Answer.add

    async def slowly(answer: Answer, text: str) -> None:
        drawing.set()
        await asyncio.sleep(0.3)
        await add(answer, text)

    monkeypatch.setattr(Answer, "add", slowly)
    stage.answers["a"] = "answer"
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        chat.prompt.put("a")
        await pilot.press("enter")
        first = chat.desk.talk.book.conversation
        await until(pilot, lambda: drawing.is_set() and first.messages[2].ending == "stop")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: bool(chat.query(Welcome)))
        assert not chat.query(Answer)
        assert kept(path) == ["a", "answer"]
        assert first.messages[2].ending == "stop"
        await ask(pilot, "b")
        assert said(chat) == kept(path) == ["b", "ok"]


@pytest.mark.parametrize("what", ["temperature=1.5", "other/model"])
async def test_a_comparison_begins_between_two_answers(chat: ChatApp, stage: Any, what: str) -> None:
    stage.answers["a"] = "answer"
    async with chat.run_test(size=(160, 40), notifications=True) as pilot:
        await ready(pilot)
        await send(pilot, stage, "a", 3)
        chat.prompt.put(f"/compare {what}")
        await pilot.press("enter")
        await until(pilot, lambda: "still coming" in screen(chat))
        assert prompt(pilot) == f"/compare {what}"
        assert len(chat.desk.talks) == 1
        await pilot.press("escape")
        stage.release()
        await until(pilot, lambda: not chat.desk.answering)
        await pilot.press("enter")
        await until(pilot, lambda: len(chat.desk.talks) == 2)
        await until(pilot, lambda: all(talk.host.state == "ready" for talk in chat.desk.talks))
        so_far = said(chat)[1]
        await ask(pilot, "b")
        assert stage.seen[1:] == [f"\0a\0{so_far}\0b"] * 2


async def test_the_end_of_a_comparison_keeps_what_the_right_one_has_said(
    chat: ChatApp, stage: Any, path: Path
) -> None:
    async with chat.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await ask(pilot, "/compare temperature=1.5")
        left, right = chat.desk.talks
        stage.held = True
        chat.prompt.put("a")
        await pilot.press("enter")
        await until(pilot, lambda: all(talk.turn and talk.turn.stream for talk in chat.desk.talks))
        assert left.leaf != right.leaf
        await chat.run_action("stop")  # before the first token of both: the prompt comes back once
        await until(pilot, lambda: prompt(pilot) == "a")
        assert chat.desk.talk.book.conversation.messages == {}
        stage.release()
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["ok", "ok"] and not chat.desk.answering)
        await ask(pilot, "/compare")
        assert kept(path) == said(chat) == ["a", "ok"]
        await until(pilot, lambda: "branch 1/2" in screen(chat))


async def test_esc_before_the_first_token_of_a_continuation_goes_back(
    chat: ChatApp, stage: Any, path: Path
) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "b")
        chat.desk.talk.path[1].ending = "length"
        stage.held = True
        chat.query(Answer).first().action_go_on()
        await until(pilot, lambda: state(pilot) == "prefill")
        await pilot.press("escape")
        await until(pilot, lambda: not chat.desk.answering)
        assert mounted(chat) == kept(path) == said(chat) == ["a", "ok", "b", "ok"]
        assert len(chat.desk.talk.book.conversation.messages) == 4
        stage.release()


async def test_an_earlier_answer_goes_on_beside_what_was_said_to_it(
    chat: ChatApp, stage: Any, path: Path
) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "b")
        chat.desk.talk.path[1].ending = "length"
        stage.answers["ok"] = " and more"
        chat.query(Answer).first().action_go_on()
        await until(pilot, lambda: answers(pilot) == ["ok and more"] and not chat.desk.answering)
        assert stage.seen[-1] == '{"continue_last": true}\0a\0ok'
        assert kept(path) == said(chat) == ["a", "ok and more"]
        await until(pilot, lambda: "branch 2/2" in screen(chat))
        await ask(pilot, "/branch prev")
        assert said(chat) == ["a", "ok", "b", "ok"]


async def test_an_edit_in_one_command_waits_for_the_answer(chat: ChatApp, stage: Any) -> None:
    async with chat.run_test(size=SIZE, notifications=True) as pilot:
        await ready(pilot)
        await send(pilot, stage, "old", 1)
        for command in ("/edit new text", "/edit @no/missing.txt"):
            chat.prompt.put(command)
            await pilot.press("enter")
            await until(pilot, lambda: "still coming" in screen(chat))
            await pilot.pause()
            assert prompt(pilot) == command
            assert chat.desk.editing is None
        stage.release()
        await until(pilot, lambda: not chat.desk.answering)
        await pilot.press("enter")  # of a file that is not there
        await until(pilot, lambda: "missing.txt is not there" in screen(chat))
        await pilot.pause()
        assert prompt(pilot) == "/edit @no/missing.txt"
        assert chat.desk.editing is None
        await ask(pilot, "/edit /etc is a folder")
        assert said(chat) == ["/etc is a folder", "ok"]
        assert stage.seen == ["\0old", "\0/etc is a folder"]


async def test_a_prompt_that_failed_is_answered_again_or_replaced(
    chat: ChatApp, stage: Any, path: Path
) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        for attempt in range(2):
            stage.crash = EngineDiedError("out of [memory]")
            await ask(pilot, f"b{attempt}")
            await until(pilot, lambda n=attempt: stage.builds == n + 2)  # type: ignore[misc]
            await ready(pilot)
            assert prompt(pilot) == f"b{attempt}"
            assert "out of [memory]" in str(chat.query(Failure).last().content)
            assert kept(path) == said(chat) == mounted(chat) == ["a", "ok", f"b{attempt}"]
            chat.prompt.put("")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: said(chat) == ["a", "ok", "b1", "ok"] and not chat.desk.answering)
        assert stage.seen == ["\0a", "\0a\0ok\0b1"]


async def test_another_answer_that_fails_leaves_the_one_before(chat: ChatApp, stage: Any) -> None:
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        stage.crash = EngineDiedError("out of [memory]")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: stage.builds == 2)
        await ready(pilot)
        assert mounted(chat) == said(chat) == ["a", "ok"]
        assert len(chat.query(Failure)) == 1
        assert prompt(pilot) == ""


async def test_a_conversation_that_ends_in_a_prompt_gets_no_second_one_behind_it(
    stage: Any, path: Path
) -> None:
    """As an earlier version, or a damaged file, may have left it."""
    conversation = Conversation()
    asked = conversation.add("user", "a", parent=None)
    conversation.add("user", "b", parent=asked.id)
    conversation.leaf = asked.id
    store = Store(path)
    store.keep(conversation)
    assert conversation.id is not None
    chat = resumed(store, store.load(conversation.id))
    async with chat.run_test(size=SIZE) as pilot:
        await ready(pilot)
        assert mounted(chat) == ["a", "b"]  # also what is below the leaf that was kept
        await ask(pilot, "c")
        assert mounted(chat) == ["c", "ok"]
        assert stage.seen == ["\0c"]
        chat.query_one(Prompt).put("/branch 1")
        await pilot.press("enter")
        await until(pilot, lambda: mounted(chat) == ["a", "b"])
