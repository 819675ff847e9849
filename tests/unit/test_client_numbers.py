"""What EngineClient says of its engine: the KV map, sums over its life."""

from __future__ import annotations

import threading

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import ContractError, EngineDiedError, FerrumError
from ferrum_mlx.messages import Answered, Died, Ready
from ferrum_mlx.metrics import CACHED, FREE, KVMap

from .client_driver import (
    ENDLESS,
    FAKE,
    LONG_CONTEXT,
    SHORT,
    WAIT,
    Make,
    Scripted,
    first_delta,
    text_of,
    until,
    wait_until_idle,
)


def test_kv_map_of_an_engine_at_work(make: Make) -> None:
    client = make(LONG_CONTEXT)
    ready = client.start(WAIT)
    assert [set(group) for group in client.kv_map(WAIT).blocks] == [{FREE}]
    stream = client.submit("go on", ENDLESS)
    first_delta(stream)
    seen = client.kv_map(WAIT)
    assert seen.groups == ("full",)
    assert sum(map(len, seen.blocks)) == ready.kv.total_blocks
    assert 1 in seen.blocks[0]
    stream.close()
    wait_until_idle(client)
    assert set(client.kv_map(WAIT).blocks[0]) <= {FREE, CACHED}


def test_kv_map_without_an_engine(make: Make) -> None:
    client = make(FAKE)
    with pytest.raises(EngineDiedError, match="not started"):
        client.kv_map(WAIT)
    client.start(WAIT)
    client.close()
    with pytest.raises(EngineDiedError, match="closed"):
        client.kv_map(WAIT)


@pytest.mark.parametrize("fault", [ValueError("no such\nblock"), ContractError("no such block")])
def test_kv_map_that_cannot_be_made_harms_no_request(
    built: list[Engine], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def kv_map() -> None:
        raise fault

    with EngineClient.in_thread(FAKE) as client:
        client.start(WAIT)
        monkeypatch.setattr(built[0].executor, "kv_map", kv_map)
        with pytest.raises(FerrumError, match="no such block"):
            client.kv_map(WAIT)
        assert len(text_of(client.submit("hello", SHORT))) == 12


def test_kv_map_of_a_busy_engine_is_not_waited_for_without_end(announced: Ready) -> None:
    Scripted.posts = []
    client = EngineClient(FAKE, Scripted)
    client._launch()
    Scripted.posts[0]([announced])
    with pytest.raises(FerrumError, match=r"no KV map within 0\.01 s"):
        client.kv_map(timeout=0.01)
    Scripted.posts[0]([Answered(1, KVMap(("late",), ((0,),)))])  # nobody asks any more
    asked: list[object] = []
    asker = threading.Thread(target=lambda: asked.append(client.kv_map(WAIT)))
    asker.start()
    until(lambda: len(client._questions) > 0)
    Scripted.posts[0]([Answered(2, KVMap(("full",), ((0, 1),)))])
    asker.join(WAIT)
    assert asked == [KVMap(("full",), ((0, 1),))]
    assert len(client._questions) == 0


def test_death_wakes_who_waits_for_a_kv_map(announced: Ready) -> None:
    Scripted.posts = []
    client = EngineClient(FAKE, Scripted)
    client._launch()
    Scripted.posts[0]([announced])
    asked: list[object] = []

    def ask() -> None:
        try:
            client.kv_map(WAIT)
        except EngineDiedError as error:
            asked.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    until(lambda: len(client._questions) > 0)
    death = EngineDiedError("gone")
    Scripted.posts[0]([Died(death)])
    asker.join(WAIT)
    assert asked == [death]


def test_totals_are_a_copy_and_start_anew_with_the_engine(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    text_of(client.submit("hello", SHORT))
    list(client.submit("x" * 5000, SHORT))
    totals = client.totals()
    assert (totals.generated_tokens, dict(totals.ended)) == (12, {"length": 1, "error": 1})
    text_of(client.submit("hello", SHORT))
    assert (totals.generated_tokens, client.totals().generated_tokens) == (12, 24)
    client.restart(WAIT)
    assert client.totals().generated_tokens == 0
    assert client.last_step is None


def test_what_died_with_the_engine_failed(built: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineClient.in_thread(FAKE) as client:
        client.start(WAIT)
        monkeypatch.setattr(built[0], "step", lambda: 1 // 0)
        list(client.submit("hello"))
        assert client.totals().ended == {"error": 1}
