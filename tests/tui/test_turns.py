"""Answering again, editing, walking between branches, going on, comparing; what is kept of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ModelNotFoundError
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Failure
from ferrum_tui.prompt import Prompt

from .driver import GREEDY, answers, below, prompt, ready, screen, state, type_in, until


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sessions.db")


@pytest.fixture
def kept(stage: Any, store: Store) -> ChatApp:
    return new_app(store)


def new_app(store: Store, **options: Any) -> ChatApp:
    config = EngineConfig(backend="fake")
    return ChatApp(config, GREEDY, "", EngineClient.in_thread, store=store, **options)


async def ask(pilot: Pilot[Any], text: str) -> None:
    pilot.app.query_one(Prompt).put(text)  # what typing does has tests of its own
    await pilot.press("enter")
    await settled(pilot)


async def settled(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    await until(pilot, lambda: not pilot.app.desk.answering and state(pilot) == "ready")


def texts(app: ChatApp) -> list[str]:
    return [message.text for message in app.desk.talk.path]


async def test_regenerate_adds_a_branch_and_the_old_answer_stays(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        stage.answers["a"] = "one"
        await ask(pilot, "a")
        stage.answers["a"] = "two"
        await pilot.press("ctrl+r")
        await settled(pilot)
        assert texts(app) == ["a", "two"]
        assert answers(pilot) == ["two"]
        assert "branch 2/2" in screen(app)
        await ask(pilot, "/branch prev")
        assert texts(app) == ["a", "one"]
        assert "branch 1/2" in screen(app)
        await ask(pilot, "b")
        assert stage.seen == ["\0a", "\0a", "\0a\0one\0b"]
        await ask(pilot, "/branch next")
        assert texts(app) == ["a", "two"]


async def test_regenerate_without_an_answer_says_so(app: ChatApp) -> None:
    async with app.run_test(notifications=True, size=(120, 36)) as pilot:
        await ready(pilot)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "no answer yet" in screen(app))


async def test_edit_goes_beside_the_prompt_and_esc_leaves_it(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await ask(pilot, "bad")
        await ask(pilot, "/edit")
        assert prompt(pilot) == "bad"
        assert app.query_one(Prompt).border_title == "edit · Esc leaves it"
        await pilot.press("escape")
        assert prompt(pilot) == ""
        assert app.desk.editing is None
        await ask(pilot, "/edit good")
        assert texts(app) == ["a", "ok", "good", "ok"]
        assert stage.seen[-1] == "\0a\0ok\0good"
        assert "branch 2/2" in screen(app)
        await ask(pilot, "/branch 1")
        assert texts(app) == ["a", "ok", "bad", "ok"]


async def test_continue_goes_on_where_the_answer_was_stopped(app: ChatApp, stage: Any) -> None:
    stage.answers |= {"a": "one two", "one": " more"}
    stage.held = True
    stage.allow(3)
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_in(pilot, "a")
        await pilot.press("enter")
        await until(pilot, lambda: answers(pilot) == ["one"])
        await pilot.press("escape")
        stage.allow(1)
        await settled(pilot)
        stopped = texts(app)[1]
        stage.answers[stopped] = "+more"
        stage.release()
        await ask(pilot, "/continue")
        assert texts(app) == ["a", f"{stopped}+more"]
        assert answers(pilot) == [f"{stopped}+more"]
        assert stage.seen[-1] == f'{{"continue_last": true}}\0a\0{stopped}'
        assert "stopped" not in below(pilot)


async def test_esc_before_the_first_token_of_another_answer_goes_back(app: ChatApp, stage: Any) -> None:
    stage.answers["a"] = "one"
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        stage.held = True
        await pilot.press("ctrl+r")
        await until(pilot, lambda: state(pilot) == "prefill")
        await pilot.press("escape")
        assert texts(app) == ["a", "one"]
        assert answers(pilot) == ["one"]
        assert prompt(pilot) == ""
        assert len(app.desk.talk.book.conversation.messages) == 2
        stage.release()


async def test_a_conversation_is_kept_and_resumed(kept: ChatApp, stage: Any, store: Store) -> None:
    stage.answers["a"] = "**one**"
    async with kept.run_test() as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        await pilot.press("ctrl+r")
        await settled(pilot)
        number = kept.desk.talk.book.conversation.id
    assert number is not None
    reopened = Store(store.path)
    again = new_app(reopened, conversation=reopened.load(number))
    async with again.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        assert texts(again) == ["a", "**one**"]
        assert answers(pilot) == ["**one**"]
        assert "branch 2/2" in screen(again)
        await pilot.press("up")
        assert prompt(pilot) == "a"
        again.query_one(Prompt).put("b")
        await pilot.press("enter")
        await settled(pilot)
    assert stage.seen[-1] == "\0a\0**one**\0b"
    assert len(Store(store.path).load(number).messages) == 5


async def test_two_settings_side_by_side(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await ask(pilot, "/compare temperature=1.5 seed=1")
        left, right = app.desk.talks
        assert left.host is right.host
        assert right.params.temperature == 1.5
        stage.held = True
        await type_in(pilot, "a")
        await pilot.press("enter")
        await until(pilot, lambda: all(talk.turn and talk.turn.stream for talk in app.desk.talks))
        stage.release()
        stage.allow(50)
        await settled(pilot)
        assert answers(pilot) == ["ok", "ok"]
        assert stage.seen == ["\0a", "\0a"]
        assert "temperature=1.5 seed=1" in screen(app)
        stage.answers["b"] = "both"
        await ask(pilot, "b")
        assert answers(pilot) == ["ok", "both", "ok", "both"]
        await ask(pilot, "/compare")
        assert len(app.desk.talks) == 1
        assert answers(pilot) == ["ok", "both"]
        await ask(pilot, "/branch next")
        assert "branch 2/2" in screen(app)


async def test_two_models_side_by_side(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await ask(pilot, "/compare other/model")
        left, right = app.desk.talks
        assert left.host is not right.host
        assert right.host.config.model == "other/model"
        await until(pilot, lambda: right.host.state == "ready")
        assert stage.builds == 2
        await ask(pilot, "a")
        assert answers(pilot) == ["ok", "ok"]
        second = right.host.client
        await ask(pilot, "/compare")
        assert second.ready is None
        assert app.host.client.ready is not None


async def test_of_two_models_one_fails_and_the_other_goes_on(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        stage.build_error = ModelNotFoundError("no model other[x]", next_step="try models list")
        await ask(pilot, "/compare other[x]")
        left, right = app.desk.talks
        await until(pilot, lambda: right.host.state == "failed")
        assert "no model other[x]" in str(right.query_one(Failure).content)
        assert str(right.transcript.border_title) == r"other\[x]"
        await ask(pilot, "a")  # and with it the other one is tried again
        await until(pilot, lambda: right.host.state == "ready" and not app.desk.answering)
        assert answers(pilot) == ["ok", "ok"]
        stage.crash, stage.crashing = RuntimeError("out of [memory]"), "other[x]"
        stage.answers["b"] = "both"
        await ask(pilot, "b")
        await until(pilot, lambda: len(right.query(Failure)) == 2)
        assert [message.text for message in left.path] == ["a", "ok", "b", "both"]
        assert "out of [memory]" in str(right.query(Failure).last().content)
        assert not left.query(Failure)
        await until(pilot, lambda: right.host.state == "ready")
        await ask(pilot, "/compare")
        assert [message.text for message in app.desk.talk.path] == ["a", "ok", "b", "both"]


async def test_another_model_takes_over_the_conversation(app: ChatApp, stage: Any) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        before = app.host.client
        await ask(pilot, "/model some/other")
        await until(pilot, lambda: app.host.client is not before and app.host.state == "ready")
        assert before.ready is None
        await ask(pilot, "b")
        assert stage.seen == ["\0a", "\0a\0ok\0b"]


async def test_settings_by_command(app: ChatApp, stage: Any) -> None:
    async with app.run_test(notifications=True, size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "/set temperature=0.5 max_tokens=3")
        assert app.desk.talk.params.temperature == 0.5
        assert "temp 0.5" in str(app.query_one(Prompt).border_subtitle)
        stage.answers["a"] = "abcdef"
        await ask(pilot, "a")
        assert answers(pilot) == ["abc"]
        await ask(pilot, "/set temperature=-1")
        await until(pilot, lambda: "temperature is -1" in screen(app))
        assert prompt(pilot) == "/set temperature=-1"
        app.query_one(Prompt).put("")
        await ask(pilot, "/system be brief")
        await ask(pilot, "b")
        assert stage.seen[-1] == "\0be brief\0a\0abc\0b"


async def test_unknown_command_stays_in_the_prompt(app: ChatApp) -> None:
    async with app.run_test(notifications=True, size=(120, 36)) as pilot:
        await ready(pilot)
        await ask(pilot, "/nwe")
        await until(pilot, lambda: "/new" in screen(app))
        assert prompt(pilot) == "/nwe"


async def test_files_are_sent_along(app: ChatApp, stage: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("buy [milk]\n")
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_in(pilot, "see @no")
        await until(pilot, lambda: "notes.md" in screen(app))
        await pilot.press("tab")
        assert prompt(pilot) == "see @notes.md "
        await until(pilot, lambda: " tok with notes.md" in screen(app))
        title = str(app.query_one(Prompt).border_title)
        await pilot.press("enter")
        await settled(pilot)
        usage = app.desk.talk.path[-1].usage
        assert usage is not None
        assert title == f"prompt · {usage.prompt_tokens} tok with notes.md"
        await until(pilot, lambda: " tok with " not in screen(app))
    assert "buy [milk]" in stage.seen[0]


async def test_completions_of_a_command(app: ChatApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(pilot)
        await type_in(pilot, "/re")
        await until(pilot, lambda: "/regen" in screen(app))
        await pilot.press("down", "tab")
        assert prompt(pilot).startswith("/re")
        assert prompt(pilot) != "/regen"
        app.query_one(Prompt).put("")
        await type_in(pilot, "/re")
        await pilot.press("escape")
        await pilot.pause()
        assert "Tab takes it" not in screen(app)


async def test_a_paste_of_many_lines_is_one_draft(app: ChatApp, stage: Any) -> None:
    from textual.events import Paste

    async with app.run_test() as pilot:
        await ready(pilot)
        app.post_message(Paste("one\ntwo\n\nthree"))
        await until(pilot, lambda: prompt(pilot) == "one\ntwo\n\nthree")
        assert not stage.seen
