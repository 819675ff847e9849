"""How the screen follows an engine: without waiting for it, through its death, not at all when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.metrics import FREE
from ferrum_mlx.sampling import SamplingParams
from ferrum_tui.engine.feed import EngineFeed
from ferrum_tui.engine.kvmap import count_all
from ferrum_tui.engine.panel import panel_lines

from .conftest import Stage
from .driver import WAIT
from .engine_readings import Client, busy

ANSWER = "a" * 50


class Steps:
    """Counts those that have begun; one hangs if the stage is held."""

    def __init__(self, stage: Stage) -> None:
        self.begun, say = 0, stage._say

        def say_and_count(*args: Any) -> int:
            self.begun += 1
            return say(*args)

        stage._say = say_and_count  # type: ignore[method-assign]


@pytest.fixture
def steps(stage: Stage) -> Steps:
    return Steps(stage)


@pytest.fixture
async def client(stage: Stage, steps: Steps) -> AsyncIterator[EngineClient]:
    stage.answers["hello"] = ANSWER
    config = EngineConfig(backend="fake", max_num_seqs=1)
    with EngineClient.in_thread(config) as client:
        client.start(WAIT)
        yield client
        stage.release()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def refreshed(feed: EngineFeed, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        await feed.refresh()
        await asyncio.sleep(0.005)


def text_of(feed: EngineFeed) -> str:
    return "\n".join(line.plain for line in panel_lines(feed, 60))


async def test_a_request_from_its_first_token_to_the_end(client: EngineClient, stage: Stage) -> None:
    feed = EngineFeed(client)
    stage.held = True
    stream, waiting = (
        client.submit("hello", SamplingParams(), "one"),
        client.submit("hello", request_id="two"),
    )
    while not ("one " in text_of(feed) and "two " in text_of(feed) and feed.busy):
        stage.allow(1)
        await feed.refresh()
    stage.release()
    await asyncio.to_thread(list, stream)
    await asyncio.to_thread(list, waiting)
    await refreshed(feed, lambda: not feed.busy and feed.view is not None and not feed.view.requests)
    assert feed.totals.decode_tokens == 2 * len(ANSWER)  # the end is a token, too; the first is prefill's
    assert feed.ttft is not None
    assert feed.ttft.last == feed.totals.latest_ttft_s[-1]
    assert feed.itl is not None
    assert feed.itl.count == len(ANSWER)
    assert feed.view is not None
    counts, kv = count_all(feed.view.kv), client.kv_map(WAIT)
    assert counts == count_all(kv)
    assert counts.free == kv.blocks[0].count(FREE)
    assert feed.step is not None
    assert counts.used + counts.shared == feed.step.kv.used_blocks == 0


async def test_a_long_step_is_not_waited_for(client: EngineClient, stage: Stage, steps: Steps) -> None:
    feed = EngineFeed(client)
    await refreshed(feed, lambda: feed.view is not None)
    stage.held = True
    stage.allow(1)
    stream = client.submit("hello", SamplingParams(), "one")
    await until(lambda: steps.begun == 2)
    before = feed.view
    for _ in range(3):
        await asyncio.wait_for(feed.refresh(), WAIT)  # returns while the step hangs
    assert feed.view is before
    assert feed._asking is not None
    assert len(client._questions) == 1  # the later ones did not ask again
    told: list[str] = []
    feed.subscribe(lambda: told.append("told"))
    stage.release()
    await until(lambda: feed.view is not before)  # the answer comes by itself
    assert told
    await asyncio.to_thread(list, stream)


async def test_what_ends_between_two_readings_is_not_left_on_the_screen(
    client: EngineClient, stage: Stage, steps: Steps
) -> None:
    """The view that was asked for in a request's last step comes, then one of the idle engine."""
    feed = EngineFeed(client)
    stage.held = True
    stream = client.submit("hello", SamplingParams(max_tokens=2), "one")
    await until(lambda: steps.begun == 1)
    await feed.refresh()  # asks, and then nobody refreshes any more
    stage.release()
    await asyncio.to_thread(list, stream)
    await until(lambda: not feed.busy and feed._asking is None and feed.step is client.last_step)
    assert feed.view is not None
    assert feed.view.requests == ()


async def test_death_and_restart(client: EngineClient, stage: Stage) -> None:
    feed = EngineFeed(client)
    list(client.submit("hello"))
    await refreshed(feed, lambda: feed.view is not None and feed.totals.decode_tokens > 0)
    stage.crash = RuntimeError("the GPU is gone [x]")
    await asyncio.to_thread(list, client.submit("hello"))
    await refreshed(feed, lambda: feed.ready is None)
    assert (feed.view, feed.busy) == (None, False)
    assert "no engine" in text_of(feed)
    assert "the GPU is gone [x]" in text_of(feed)
    await asyncio.to_thread(client.restart, WAIT)
    feed.attach(client)
    await refreshed(feed, lambda: feed.view is not None)
    assert (feed.totals.decode_tokens, feed.now_tps) == (0, 0.0)
    assert "run 0  wait 0" in text_of(feed)


async def test_death_while_the_answer_is_awaited(client: EngineClient, stage: Stage, steps: Steps) -> None:
    feed = EngineFeed(client)
    stage.held = True
    stream = client.submit("hello")
    await until(lambda: steps.begun == 1)
    await feed.refresh()
    assert feed._asking is not None
    closing = asyncio.create_task(asyncio.to_thread(client.close))
    await until(lambda: feed._asking is None)  # told by nobody else
    stage.release()
    await closing
    assert feed.ready is None
    assert feed.view is None
    assert len(list(stream)) == 1


async def test_a_late_answer_of_an_old_engine_is_not_the_new_ones(
    client: EngineClient, stage: Stage, steps: Steps
) -> None:
    feed = EngineFeed(client)
    stage.held = True
    stream = client.submit("hello")
    await until(lambda: steps.begun == 1)
    await feed.refresh()
    old = feed._asking
    assert old is not None
    other = busy()
    feed.attach(other)  # type: ignore[arg-type]
    await feed.refresh()
    stage.release()
    await old
    assert feed.view is other.answer
    await asyncio.to_thread(list, stream)


async def test_an_idle_engine_is_asked_once_and_then_left_alone() -> None:
    idle = Client()
    idle.work(1, running=0, waiting=0)
    feed = EngineFeed(idle)  # type: ignore[arg-type]
    told: list[str] = []
    feed.subscribe(lambda: told.append("told"))
    await feed.refresh()
    assert (idle.asked, len(told)) == (1, 2)  # the numbers at hand, the view
    for _ in range(5):
        await feed.refresh()
    assert (idle.asked, len(told), len(feed.history.samples)) == (1, 2, 1)
    idle.work(1)
    await feed.refresh()
    assert (idle.asked, len(told)) == (2, 4)


async def test_the_speed_is_of_tokens_and_time_however_they_are_bundled() -> None:
    """Accepted guesses come several at once; a chunk of the prompt is no output."""
    now = 0.0
    client = Client()
    feed = EngineFeed(client, lambda: now)  # type: ignore[arg-type]
    for i in range(41):
        await feed.refresh()
        now += 0.25
        client.work(50 if i % 4 == 3 else 0, prefill_tokens=512)
    assert feed.now_tps == pytest.approx(50, rel=0.01)
    assert feed.history.prefill_rates(60)[-5:] == pytest.approx([2048] * 5, rel=0.01)
    client.work(0, running=0, waiting=0)
    await feed.refresh()
    assert feed.now_tps == 0.0
