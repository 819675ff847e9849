"""Two models side by side: each has its half of the memory for KV, and that is said."""

from __future__ import annotations

from typing import Any

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui import sharing
from ferrum_tui.app import ChatApp
from ferrum_tui.notices import Remark

from .conversing import ask
from .driver import GREEDY, answers, ready, until

POOL = 65_600  # bytes of the fake's, whatever its share


def remarks(app: ChatApp) -> list[str]:
    return [str(remark.content) for remark in app.query(Remark)]


@pytest.mark.parametrize("free", [4 * POOL - 2, None])
async def test_a_pool_of_more_than_half_is_made_anew(
    free: int | None, app: ChatApp, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "free_here", lambda route: free)
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await ask(pilot, "a")
        before = app.host
        stage.may_build.clear()
        await ask_without_waiting(pilot, "/compare other/model")
        await until(pilot, lambda: len(stage.configs) == 2)
        assert before.client.ready is None
        await until(pilot, lambda: app.desk.talks[-1].host.detail == "waiting for smollm2-135m")
        assert [config.model for config in stage.configs] == ["", ""]  # one loads behind the other
        stage.may_build.set()
        await until(pilot, lambda: all(talk.host.state == "ready" for talk in app.desk.talks))
        assert [(config.model, config.memory_share) for config in stage.configs] == [
            ("", 1.0),
            ("", 0.5),
            ("other/model", 0.5),
        ]
        assert any("starts again with half of the memory for KV; model gets" in said for said in remarks(app))
        await ask(pilot, "b")
        assert answers(pilot) == ["ok", "ok", "ok", "ok"]
        await ask(pilot, "/compare third/model")
        await until(pilot, lambda: len(app.desk.talks) == 2 and app.desk.talks[1].host.state == "ready")
        assert [config.model for config in stage.configs[3:]] == ["third/model"]  # the left one has its half
        await ask(pilot, "/compare")
        await until(pilot, lambda: any("has half of the memory" in said for said in remarks(app)))
        await ask(pilot, "/model whole/model")
        await until(pilot, lambda: len(stage.configs) == 5)
        assert stage.configs[-1].memory_share == 1.0


async def ask_without_waiting(pilot: Any, text: str) -> None:
    pilot.app.prompt.put(text)
    await pilot.press("enter")


async def test_a_pool_within_its_half_stays(
    app: ChatApp, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "free_here", lambda route: 4 * POOL)
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        client = app.host.client
        await ask(pilot, "/compare other/model")
        await until(pilot, lambda: app.desk.talks[1].host.state == "ready")
        assert app.host.client is client
        assert client.ready is not None
        assert client.ready.memory.kv_pool_bytes == POOL
        assert [(config.model, config.memory_share) for config in stage.configs] == [
            ("", 1.0),
            ("other/model", 0.5),
        ]
        (said,) = remarks(app)
        assert "keeps its KV pool, 65.6 kB, no more than half of the memory for KV; model gets" in said
        await ask(pilot, "/compare")
        assert not any("has half" in said for said in remarks(app))


async def test_a_draft_of_another_vocabulary_stays_with_its_model(stage: Any) -> None:
    config = EngineConfig(backend="fake", model="smollm2-1.7b", speculative="draft:smollm2-135m")
    app = ChatApp(config, GREEDY, make_client=EngineClient.in_thread)
    said = "note: smollm2-135m drafts for the model before, and stays behind"
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        for model, drafts in (("smollm2-360m", True), ("qwen3-0.6b", False)):
            await ask(pilot, f"/compare {model}")
            right = app.desk.talks[1]
            await until(pilot, lambda talk=right: talk.host.state == "ready")  # type: ignore[misc]
            assert (said in [str(each.content) for each in right.query(Remark)]) is not drafts
            assert stage.configs[-1].speculative == (config.speculative if drafts else "off")
        assert app.host.config.speculative == config.speculative
        await ask(pilot, "/model qwen3-0.6b")
        await until(pilot, lambda: said in remarks(app) and app.host.state == "ready")
        assert stage.configs[-1].speculative == "off"


async def test_of_kv_memory_each_gets_half(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "free_here", lambda route: 10**12)
    config = EngineConfig(backend="fake", kv_memory=POOL)
    app = ChatApp(config, GREEDY, make_client=EngineClient.in_thread)
    async with app.run_test(size=(160, 40)) as pilot:
        await ready(pilot)
        await ask(pilot, "/compare other/model")
        await until(pilot, lambda: app.desk.talks[-1].host.state == "ready")
    assert [config.memory_share for config in stage.configs] == [1.0, 0.5, 0.5]
