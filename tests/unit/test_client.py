"""EngineClient over both transports, on the fake backend."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import (
    ContextLengthError,
    EngineDiedError,
    ModelNotFoundError,
    UsageError,
)
from ferrum_mlx.messages import Delta, Died, Failed, Finished, Ready
from ferrum_mlx.stream import RequestStream

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


def test_stream_ends_after_finished(make: Make) -> None:
    client = make(FAKE)
    assert client.start(WAIT).backend == "fake"
    events = list(client.submit("hello", SHORT))
    assert sum(len(event.token_ids) for event in events[:-1] if isinstance(event, Delta)) == 12
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.completion_tokens) == ("length", 12)
    assert client.last_step is not None


def test_request_sent_while_loading_is_served(make: Make) -> None:
    client = make(FAKE)
    starter = threading.Thread(target=client.start)
    starter.start()
    until(lambda: client._transport is not None)
    assert len(text_of(client.submit("early", SHORT))) == 12
    starter.join(WAIT)


def test_abort_ends_with_reason_abort_and_frees_blocks(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    stream = client.submit("go on", ENDLESS)
    first_delta(stream)
    stream.abort()
    end = list(stream)[-1]
    assert isinstance(end, Finished)
    assert end.finish_reason == "abort"
    wait_until_idle(client)


def _computed(client: EngineClient) -> dict[str, int]:
    return {request.request_id: request.computed_tokens for request in client.view(WAIT).requests}


def test_held_engine_takes_no_step_until_an_abort(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    stopped, other = client.submit("stop me", ENDLESS, "stopped"), client.submit("go on", ENDLESS, "other")
    first_delta(other)
    before = _computed(client)
    until(lambda: _computed(client)["other"] > before["other"])  # as it does when it is not held
    client.hold(600)
    held = _computed(client)
    time.sleep(0.1)
    assert _computed(client) == held
    stopped.abort()
    until(lambda: _computed(client).get("other", 0) > held["other"])
    assert [event.stats.finish_reason for event in stopped if isinstance(event, Finished)] == ["abort"]
    assert _computed(client).keys() == {"other"}
    other.close()


def test_a_hold_ends_by_itself(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    client.hold(0.05)
    assert text_of(client.submit("hello", SHORT))
    client.hold(0.05)  # without work, then with it
    time.sleep(0.1)
    assert text_of(client.submit("hello", SHORT))


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_leaving_a_stream_aborts_its_request(make: Make, how: str) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    stream = client.submit("go on", ENDLESS)
    for _ in stream:
        break
    if how == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    wait_until_idle(client)


def test_drain_never_waits_and_loses_nothing(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    stream = client.submit("hello", SHORT)
    events = stream.drain()
    until(lambda: bool(events.extend(stream.drain())) or stream.ended)
    assert isinstance(events[-1], Finished)
    assert len(events) == 13
    assert stream.drain() == []


def test_bad_prompt_fails_alone(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    stream = client.submit_all([("x" * 5000, SHORT), ("fine", SHORT)])
    events = list(stream)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == [stream.request_ids[0]]
    assert isinstance(failed[0].error, ContextLengthError)
    assert any(isinstance(event, Finished) for event in events)


def test_four_threads_at_once(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    alone = [text_of(client.submit(f"prompt {i}", SHORT)) for i in range(4)]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = text_of(client.submit(f"prompt {i}", SHORT))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [together[i] for i in range(4)] == alone


async def test_async_iteration_and_cancellation(make: Make) -> None:
    client = make(LONG_CONTEXT)
    await asyncio.to_thread(client.start, WAIT)

    async def text(stream: RequestStream) -> str:
        return "".join([event.text async for event in stream if isinstance(event, Delta)])

    both = await asyncio.gather(text(client.submit("a", SHORT)), text(client.submit("b", SHORT)))
    assert [len(t) for t in both] == [12, 12]

    endless = asyncio.create_task(text(client.submit("go on", ENDLESS)))
    await asyncio.sleep(0.05)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    del endless
    gc.collect()
    await asyncio.to_thread(wait_until_idle, client)


def test_close_wakes_waiters_and_is_idempotent(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    ends: list[object] = []
    waiter = threading.Thread(target=lambda: ends.extend(list(client.submit("go on", ENDLESS))[-1:]))
    waiter.start()
    until(lambda: bool(client._mailboxes))
    client.close()
    client.close()
    waiter.join(WAIT)
    assert isinstance(ends[0], Failed)
    assert "closed" in str(ends[0].error)
    after = list(client.submit("too late"))
    assert isinstance(after[0], Failed)


def test_not_started_says_so() -> None:
    (event,) = EngineClient.in_thread(FAKE).submit("hello")
    assert isinstance(event, Failed)
    assert "not started" in str(event.error)


def test_start_raises_what_the_build_raised(make: Make) -> None:
    client = make(EngineConfig(model="/no/such.gguf", offline=True))
    with pytest.raises(ModelNotFoundError, match="no/such"):
        client.start(WAIT)


def test_request_ids_are_unique_among_open_requests(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    stream = client.submit("go on", ENDLESS, request_id="mine")
    with pytest.raises(UsageError, match="mine"):
        client.submit("again", SHORT, request_id="mine")
    stream.close()


def test_automatic_ids_pass_over_those_in_use(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    streams = [client.submit("go on", ENDLESS, request_id="2")]
    streams += [client.submit("go on", ENDLESS) for _ in range(2)]
    assert [stream.request_ids for stream in streams] == [("2",), ("1",), ("3",)]
    with pytest.raises(UsageError, match="same"):
        client.submit_all([("a", SHORT), ("b", SHORT)], ["same", "same"])


def test_late_word_of_an_old_engine_is_not_the_new_one_s(announced: Ready) -> None:
    Scripted.posts = []
    died: list[Exception] = []
    client = EngineClient(FAKE, Scripted, on_died=died.append)

    def launch(start: Callable[[float], Ready]) -> None:
        starter = threading.Thread(target=start, args=(WAIT,))
        before = len(Scripted.posts)
        starter.start()
        until(lambda: len(Scripted.posts) > before)
        Scripted.posts[-1]([announced])
        starter.join(WAIT)

    launch(client.start)
    launch(client.restart)
    stream = client.submit("hello")
    Scripted.posts[0]([Delta("1", "late", (1,)), Died(EngineDiedError("long gone"))])
    assert (client.ready, client.death, died, stream.drain()) == (announced, None, [], [])
    Scripted.posts[1]([Delta("1", "mine", (1,)), Died(EngineDiedError("now")), Delta("1", "more", (2,))])
    assert [type(event) for event in stream] == [Delta, Failed]
    assert len(died) == 1


def test_closing_a_stream_wakes_who_waits_for_it(announced: Ready) -> None:
    Scripted.posts = []
    client = EngineClient(FAKE, Scripted)
    client._launch()
    stream = client.submit("hello")
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(list(stream)), daemon=True)
    waiter.start()
    until(lambda: bool(stream._mailbox._arrived._waiters))  # type: ignore[attr-defined]
    stream.close()
    waiter.join(WAIT)
    assert got == [[]]


async def test_closing_a_stream_wakes_a_task_that_waits_for_it() -> None:
    Scripted.posts = []
    client = EngineClient(FAKE, Scripted)
    client._launch()
    stream = client.submit("hello")
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    assert stream._mailbox._waiters
    stream.close()
    assert await asyncio.wait_for(waiting, WAIT) is None


def test_step_that_raises_is_death_not_a_hang(built: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[Exception] = []
    client = EngineClient.in_thread(FAKE)
    client.on_died = died.append
    with client:
        client.start(WAIT)
        monkeypatch.setattr(built[0], "step", lambda: 1 // 0)
        (event,) = client.submit("hello")
        assert isinstance(event, Failed)
        assert "ZeroDivisionError" in str(event.error)
        assert "test_client.py" in str(event.error)
        until(lambda: died == [event.error])
