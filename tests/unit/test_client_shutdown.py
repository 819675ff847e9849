"""Shutdown wakes everyone and returns: whatever the engine does, whoever waits, also without a close."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ferrum_mlx import build
from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import EngineDiedError, ModelNotFoundError
from ferrum_mlx.messages import Failed, Ready
from ferrum_mlx.transport import ThreadTransport

from .client_driver import (
    ENDLESS,
    FAKE,
    LONG_CONTEXT,
    SHORT,
    WAIT,
    Make,
    Scripted,
    text_of,
    until,
)


class Held:
    """Engines whose build, or whose every step, waits for `go`.

    Attributes:
        at: "build" or "step".
        built: the engines.
        stages: how far a build has come.
    """

    def __init__(self) -> None:
        self.at = ""
        self.go, self.waiting = threading.Event(), threading.Event()
        self.built: list[Engine] = []
        self.stages: list[str] = []

    def build(self, config: EngineConfig, narrate: Callable[[str], None]) -> Engine:
        for stage in ("first", "second"):
            narrate(stage)
            self.stages.append(stage)
            self.wait("build")
        executor = FakeExecutor(config)
        executor.prepare_startup()
        engine = Engine(executor, FakeCodec(), config, backend="fake", backend_reason="a test")
        step = engine.step
        engine.step = lambda: (self.wait("step"), step())[1]  # type: ignore[method-assign]
        self.built.append(engine)
        return engine

    def wait(self, where: str) -> None:
        if self.at == where:
            self.waiting.set()
            assert self.go.wait(WAIT)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(build, "build_engine", held.build)
    yield held
    held.go.set()


class Waiter:
    """A call in a thread of its own: what it returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.result: object = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except EngineDiedError as error:
            self.result = error

    def end(self) -> object:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        return self.result


async def last_of(client: EngineClient) -> object:
    return [event async for event in client.submit("go on", ENDLESS)][-1]


def wait_for_answers(client: EngineClient) -> list[Waiter]:
    """In a thread, and in an event loop."""
    waiters = [
        Waiter(lambda: list(client.submit("go on", ENDLESS))[-1]),
        Waiter(lambda: asyncio.run(last_of(client))),
    ]
    until(lambda: len(client._mailboxes) == 2)
    return waiters


def wait_for_a_kv_map(client: EngineClient) -> Waiter:
    waiter = Waiter(lambda: client.kv_map(WAIT))
    until(lambda: len(client._questions) > 0)
    return waiter


def is_told(result: object) -> bool:
    return "the engine is closed" in str(result.error if isinstance(result, Failed) else result)


def test_close_while_a_step_runs(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is woken before the step ends; close has patience, but not without end."""
    monkeypatch.setattr("ferrum_mlx.client._PATIENCE", 0.05)
    held.at = "step"
    client = EngineClient.in_thread(LONG_CONTEXT)
    client.start(WAIT)
    waiters = wait_for_answers(client)
    assert held.waiting.wait(WAIT)
    waiters.append(wait_for_a_kv_map(client))
    capacity = held.built[0].executor.capacity
    released = Waiter(lambda: capacity.wait(capacity.value))
    client.close()
    assert all(is_told(waiter.end()) for waiter in waiters)
    held.go.set()
    assert released.end() is False
    until(lambda: not ThreadTransport._at_work)


def test_close_while_the_engine_loads(held: Held) -> None:
    """It loads no further than to the end of its stage."""
    held.at = "build"
    client = EngineClient.in_thread(LONG_CONTEXT)
    starter = Waiter(client.start)
    assert held.waiting.wait(WAIT)
    waiters = [starter, *wait_for_answers(client), wait_for_a_kv_map(client)]
    client.close()
    assert all(is_told(waiter.end()) for waiter in waiters)
    held.go.set()
    until(lambda: not ThreadTransport._at_work)
    assert (held.stages, held.built) == (["first"], [])


def test_close_right_after_the_start(make: Make) -> None:
    client = make(LONG_CONTEXT)
    starter = Waiter(client.start)
    until(lambda: client._transport is not None)
    waiters = wait_for_answers(client)
    client.close()
    assert all(is_told(waiter.end()) for waiter in waiters)
    assert isinstance(starter.end(), (EngineDiedError, Ready))  # it may have been ready by then


def test_close_again_and_from_several_threads(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    waiters = wait_for_answers(client)
    closers = [Waiter(client.close) for _ in range(4)]
    assert [closer.end() for closer in closers] == [None] * 4
    assert all(is_told(waiter.end()) for waiter in waiters)
    client.close()
    assert client.restart(WAIT).backend == "fake"
    assert len(text_of(client.submit("hello", SHORT))) == 12


def test_close_from_a_callback(make: Make) -> None:
    """It is called in the thread that brings the events."""
    client = make(EngineConfig(model="/no/such.gguf", offline=True))
    client.on_died = lambda error: client.close()
    with pytest.raises(ModelNotFoundError):
        client.start(WAIT)
    until(lambda: client._life == 2)
    client.config = FAKE
    assert client.restart(WAIT).backend == "fake"


def test_start_that_takes_too_long_can_be_waited_for_again(held: Held) -> None:
    held.at = "build"
    with EngineClient.in_thread(FAKE) as client:
        with pytest.raises(EngineDiedError, match=r"not ready after 0\.01 s"):
            client.start(0.01)
        held.go.set()
        assert client.start(WAIT).backend == "fake"
    assert len(held.built) == 1


# Restarts


class Stuck(Scripted):
    """Does not stop before it may."""

    may_stop = threading.Event()

    def stop(self, patience: float) -> None:
        assert self.may_stop.wait(WAIT)


@pytest.fixture
def stuck(announced: Ready) -> EngineClient:
    """A client whose engine is ready, and slow to stop."""
    Scripted.posts = []
    Stuck.may_stop = threading.Event()
    client = EngineClient(FAKE, Stuck)
    client._launch()
    Scripted.posts[0]([announced])
    return client


def test_two_restarts_at_once_bring_up_one_engine(stuck: EngineClient, announced: Ready) -> None:
    waiters = [Waiter(stuck.restart) for _ in range(2)]
    until(lambda: stuck._life == 3)  # both are stopping the old one
    Stuck.may_stop.set()
    until(lambda: len(Scripted.posts) == 2)
    Scripted.posts[1]([announced])
    assert [waiter.end() for waiter in waiters] == [announced, announced]
    assert len(Scripted.posts) == 2


def test_close_during_a_restart_is_the_last_word(stuck: EngineClient) -> None:
    restart = Waiter(stuck.restart)
    until(lambda: stuck._life == 2)
    close = Waiter(stuck.close)
    until(lambda: stuck._life == 3)
    Stuck.may_stop.set()
    close.end()
    assert is_told(restart.end())
    assert len(Scripted.posts) == 1


def test_close_wakes_a_restart_that_loads(held: Held) -> None:
    client = EngineClient.in_thread(FAKE)
    client.start(WAIT)
    held.at = "build"
    restart = Waiter(client.restart)
    assert held.waiting.wait(WAIT)
    client.close()
    assert is_told(restart.end())


# The end of the interpreter without a close

BEGIN = """
import asyncio, threading, time
from ferrum_mlx import build
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.llm import LLM
from ferrum_mlx.sampling import SamplingParams
CONFIG = EngineConfig(backend="fake", max_model_len=200_000)
ENDLESS = SamplingParams(ignore_eos=True)
"""
STREAM = "client.start(); stream = client.submit('go on', ENDLESS); next(stream)"
CONSUMER = "threading.Thread(target=lambda: list(client.submit('go on', ENDLESS)), daemon=True).start()"
LOADING = "client._launch(); time.sleep(0.3)"
EXITS = {
    "in a thread": f"client = EngineClient.in_thread(CONFIG); {STREAM}",
    "in a process": f"client = EngineClient.in_process(CONFIG); {STREAM}",
    "with a waiting thread": f"client = EngineClient.in_thread(CONFIG); {STREAM}; {CONSUMER}; next(stream)",
    "by an exception": f"client = EngineClient.in_process(CONFIG); {STREAM}; raise SystemExit(0)",
    "LLM": "llm = LLM(backend='fake'); deltas = llm.generate('go on', ENDLESS, stream=True); next(deltas)",
    "in an event loop": """
async def main():
    llm = LLM(backend="fake", max_model_len=200_000)
    async for _ in llm.agenerate("go on", ENDLESS, stream=True):
        break
asyncio.run(main())
""",
    "loading in a process": f"client = EngineClient.in_process(CONFIG); {LOADING}",
    "loading in a thread": f"""
def build_engine(config, narrate):
    while True:
        narrate("forever")
        time.sleep(0.01)
build.build_engine = build_engine
client = EngineClient.in_thread(CONFIG); {LOADING}
""",
}


@pytest.mark.parametrize("how", EXITS)
def test_interpreter_ends_without_a_close(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + EXITS[how]], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_interpreter_waits_for_the_stage_in_which_an_engine_loads() -> None:
    """In an array library's code, a thread that is ended aborts the process."""
    script = """
def build_engine(config, narrate):
    narrate("a stage")
    time.sleep(0.5)
    print("end of the stage", flush=True)
    narrate("the next")
    print("not reached")
build.build_engine = build_engine
client = EngineClient.in_thread(CONFIG)
client._launch()
time.sleep(0.2)
"""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end of the stage\n")
