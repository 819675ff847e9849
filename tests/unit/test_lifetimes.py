"""Whoever waited for an answer goes away: the request ends, in whatever state it is."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ferrum_mlx import build
from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import Pending
from ferrum_mlx.llm import LLM
from ferrum_mlx.messages import Failed
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.stream import RequestStream

from .client_driver import ENDLESS, LONG_CONTEXT, SHORT, WAIT, Make, first_delta, text_of, until

HUGE = "x" * 60_000  # a token a step: its prefill outlasts any test
BIG = "y" * 10_000
Leave = Callable[[EngineClient, str, Callable[[], bool]], None]


@dataclass(frozen=True)
class State:
    """A request in it, known by what the engine says of its latest step.

    Attributes:
        others: prompts of requests that are there before, and stay.
        kv_tokens: size of the pool; 0 is large.
    """

    prompt: str
    reached: Callable[[StepStats], bool]
    others: tuple[str, ...] = ()
    kv_tokens: int = 0
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def config(self) -> EngineConfig:
        kv_memory = self.kv_tokens * 4 or None
        return EngineConfig(backend="fake", max_model_len=200_000, kv_memory=kv_memory, **self.settings)


SLOW = {"max_prefill_chunk": 1}
STATES = {
    "queued": State("go on", lambda s: s.waiting == 1, ("first",), settings={"max_num_seqs": 1}),
    "waiting for blocks": State(BIG, lambda s: s.waiting == 1, (HUGE,), 61_000, SLOW),
    "waiting for a prefix": State(HUGE, lambda s: s.waiting == 1, (HUGE,), settings=SLOW),
    "in prefill": State(HUGE, lambda s: s.running == 1 and s.prefill_tokens == 1, settings=SLOW),
    "in prefill beside a decode": State(
        HUGE, lambda s: (s.running, s.prefill_tokens, s.decode_tokens) == (2, 1, 1), ("go on",), settings=SLOW
    ),
    "decoding": State("go on", lambda s: s.decode_tokens == 1),
    "decoding beside another": State("go on", lambda s: s.decode_tokens == 2, ("me too",)),
    "preempted": State(BIG, lambda s: s.preempted == 1, (BIG.swapcase(),), 20_100),
}


def dropped(client: EngineClient, prompt: str, reached: Callable[[], bool]) -> None:
    stream = client.submit(prompt, ENDLESS)
    until(reached)
    del stream


def closed(client: EngineClient, prompt: str, reached: Callable[[], bool]) -> None:
    with client.submit(prompt, ENDLESS) as stream:
        until(reached)
    assert stream.ended


def thread_killed(client: EngineClient, prompt: str, reached: Callable[[], bool]) -> None:
    """By an exception that nobody catches, while it holds its stream in a variable."""

    def consume() -> None:
        stream = client.submit(prompt, ENDLESS)
        until(reached)
        stream.drain()
        raise LookupError

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(WAIT)


def task_cancelled(client: EngineClient, prompt: str, reached: Callable[[], bool]) -> None:
    async def consume(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        task = asyncio.create_task(consume(client.submit(prompt, ENDLESS)))
        await asyncio.to_thread(until, reached)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def runs(client: EngineClient, count: int) -> bool:
    """So many requests run, none waits, nobody else is waited for; without any, no block is in use."""
    step = client.last_step
    if step is None or (step.running, step.waiting, len(client._mailboxes)) != (count, 0, count):
        return False
    return bool(step.kv.used_blocks) == bool(count)


def see_off(client: EngineClient, state: State, leave: Leave) -> None:
    """One consumer goes, and the other requests do not notice."""
    others = [client.submit(prompt, ENDLESS) for prompt in state.others]
    until(lambda: not others or runs(client, len(others)))
    leave(client, state.prompt, lambda: client.last_step is not None and state.reached(client.last_step))
    gc.collect()
    until(lambda: runs(client, len(others)))
    assert not any(isinstance(event, Failed) for stream in others for event in stream.drain())
    for stream in others:
        stream.close()
    until(lambda: runs(client, 0))


@pytest.mark.parametrize("name", STATES)
def test_a_consumer_goes_away(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In each way, from each state."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest's would keep the dead frame
    client = make(STATES[name].config)
    client.start(WAIT)
    for leave in (dropped, closed, thread_killed, task_cancelled):
        see_off(client, STATES[name], leave)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_samples_of_one_prompt_all_end(make: Make, how: str) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    params = SamplingParams(n=3, temperature=1.0, ignore_eos=True)
    stream = client.submit(BIG, params)
    until(lambda: client.last_step is not None and client.last_step.decode_tokens == 3)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    until(lambda: runs(client, 0))


# By the result of the step in flight


class Gated(FakeExecutor):
    """Each forward says that it has begun, and waits for leave to end."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def _launch(self, batch: UnifiedBatch) -> Pending:
        self.begun.release()
        self.may_end.acquire()
        return super()._launch(batch)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gated]]:
    """The executors of the engines that this process builds; they run freely once the test is over."""
    executors: list[Gated] = []

    def building(config: EngineConfig, *_: object) -> Engine:
        executors.append(Gated(config))
        executors[-1].prepare_startup()
        return Engine(executors[-1], FakeCodec(), config, backend="fake", backend_reason="a test")

    monkeypatch.setattr(build, "build_engine", building)
    yield executors
    for executor in executors:
        executor.may_end.release(1_000_000)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_no_step_begins_for_who_left_during_one(gated: list[Gated], steps: int, how: str) -> None:
    """In the step that admits it, within its prompt of two chunks, decoding."""
    config = EngineConfig(backend="fake", max_prefill_chunk=3)
    with EngineClient.in_thread(config) as client:
        client.start(WAIT)
        executor = gated[0]
        stream = client.submit("hello", ENDLESS)
        for _ in range(steps):
            assert executor.begun.acquire(timeout=WAIT)
            executor.may_end.release()
        assert executor.begun.acquire(timeout=WAIT)
        used = executor.kv.usage().used_blocks
        if how == "close":
            stream.close()
        del stream
        executor.may_end.release()
        until(lambda: runs(client, 0))
        assert (used, len(executor.batches)) == (1, steps + 1)


def test_who_left_while_the_engine_loaded_is_not_served(gated: list[Gated]) -> None:
    with EngineClient.in_thread(LONG_CONTEXT) as client:
        client._launch()
        client.submit("hello", ENDLESS).close()
        client.start(WAIT)
        until(lambda: runs(client, 0))
        assert not gated[0].batches


# Through LLM


@pytest.mark.parametrize("how", ["next", "for", "exception"])
def test_leaving_the_deltas_of_an_llm(how: str) -> None:
    with LLM(backend="fake", max_model_len=200_000) as llm:
        params = SamplingParams(n=2, temperature=1.0, ignore_eos=True)
        deltas = llm.generate(["one", "two"], params, stream=True)
        if how == "next":
            next(deltas)
        elif how == "for":
            for _ in deltas:
                break
        else:
            with pytest.raises(LookupError):
                _raise_at_first(deltas)
        del deltas
        gc.collect()
        until(lambda: runs(llm._client, 0))


def _raise_at_first(deltas: Iterator[object]) -> None:
    for _ in deltas:
        raise LookupError


def test_leaving_the_deltas_of_an_llm_in_a_task() -> None:
    with LLM(backend="fake", max_model_len=200_000) as llm:

        async def leave() -> None:
            async for _ in llm.agenerate("go on", ENDLESS, stream=True):
                return

        async def run_out_of_time() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.achat([{"role": "user", "content": "go on"}], ENDLESS), 0.05)

        for consumer in (leave, run_out_of_time):
            asyncio.run(consumer())
            gc.collect()
            until(lambda: runs(llm._client, 0))


# Ids that are used again


def test_an_old_stream_does_not_end_the_new_request_of_its_id(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    whole = text_of(client.submit("hello", SHORT))
    for how in ("drop", "close"):
        old = client.submit("hello", SHORT, request_id="mine")
        until(lambda: not client._mailboxes)  # the engine is done, though nobody has read it
        new = client.submit("go on", ENDLESS, request_id="mine")
        first_delta(new)
        if how == "close":
            old.close()
        else:
            assert text_of(old) == whole
        del old
        kept = client.submit("hello", SHORT)
        assert text_of(kept) == whole  # commands are obeyed in order, so an abort would have been by now
        assert list(client._mailboxes) == ["mine"]
        new.close()
        until(lambda: not client._mailboxes)
