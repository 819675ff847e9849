"""EngineClient over both transports, on the fake backend."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ferrum_mlx import build
from ferrum_mlx.client import EngineClient, RequestStream
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import BackendUnavailableError, ContextLengthError, EngineDiedError, UsageError
from ferrum_mlx.messages import Delta, Failed, Finished
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.transport import ProcessTransport

FAKE = EngineConfig(backend="fake")
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)  # as long as the context: longer than any test waits
LONG_CONTEXT = EngineConfig(backend="fake", max_model_len=200_000)
WAIT = 60.0  # seconds before a test gives up; never a measure of speed

Make = Callable[[EngineConfig], EngineClient]


@pytest.fixture(params=["thread", "process"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[EngineClient] = []
    form = EngineClient.in_thread if request.param == "thread" else EngineClient.in_process

    def make(config: EngineConfig) -> EngineClient:
        made.append(form(config))
        return made[-1]

    yield make
    for client in made:
        client.close()


def text_of(stream: RequestStream) -> str:
    return "".join(event.text for event in stream if isinstance(event, Delta))


def first_delta(stream: RequestStream) -> Delta:
    return next(event for event in stream if isinstance(event, Delta))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def child_pid(client: EngineClient) -> int:
    assert isinstance(client._transport, ProcessTransport)
    return client._transport.pid


def wait_until_idle(client: EngineClient) -> None:
    """Send a probe, and see that it was all that ran and that no block is left in use."""
    end = list(client.submit("probe", SamplingParams(max_tokens=2, ignore_eos=True)))[-1]
    assert isinstance(end, Finished)
    until(lambda: client.last_step is not None and client.last_step.kv.used_blocks == 0)
    assert client.last_step is not None
    assert (client.last_step.running, client.last_step.waiting) == (0, 0)


def test_stream_ends_after_finished(make: Make) -> None:
    client = make(FAKE)
    assert client.start(WAIT).backend == "fake"
    events = list(client.submit("hello", SHORT))
    assert sum(len(event.token_ids) for event in events[:-1] if isinstance(event, Delta)) == 12
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.completion_tokens) == ("length", 12)
    assert client.last_step is not None


def test_both_transports_say_the_same() -> None:
    with EngineClient.in_thread(FAKE) as here, EngineClient.in_process(FAKE) as there:
        here.start(WAIT)
        there.start(WAIT)
        assert text_of(here.submit("hello", SHORT)) == text_of(there.submit("hello", SHORT))


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
    client = make(EngineConfig(backend="torch"))
    with pytest.raises(BackendUnavailableError, match="torch"):
        client.start(WAIT)


def test_request_ids_are_unique_among_open_requests(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    stream = client.submit("go on", ENDLESS, request_id="mine")
    with pytest.raises(UsageError, match="mine"):
        client.submit("again", SHORT, request_id="mine")
    stream.close()


def test_step_that_raises_is_death_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_engine(*args: object) -> Engine:
        engine = real_build(FAKE)
        monkeypatch.setattr(engine, "step", lambda: 1 // 0)
        return engine

    real_build = build.build_engine
    monkeypatch.setattr(build, "build_engine", broken_engine)
    died: list[Exception] = []
    client = EngineClient.in_thread(FAKE)
    client.on_died = died.append
    with client:
        client.start(WAIT)
        (event,) = client.submit("hello")
        assert isinstance(event, Failed)
        assert "ZeroDivisionError" in str(event.error)
        assert "test_client.py" in str(event.error)
        until(lambda: died == [event.error])


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGABRT, "SIGABRT")])
def test_killed_child_fails_its_streams_and_restarts(number: int, name: str) -> None:
    died: list[Exception] = []
    with EngineClient.in_process(LONG_CONTEXT, on_died=died.append) as client:
        client.start(WAIT)
        streams = [client.submit("go on", ENDLESS), client.submit("you too", ENDLESS)]
        for stream in streams:
            first_delta(stream)
        os.kill(child_pid(client), number)
        for stream in streams:
            end = list(stream)[-1]
            assert isinstance(end, Failed)
            assert isinstance(end.error, EngineDiedError)
            assert name in str(end.error)
        assert client.ready is None
        assert isinstance(next(client.submit("hello")), Failed)
        client.restart(WAIT)
        assert len(text_of(client.submit("hello", SHORT))) == 12
    assert len(died) == 1


@pytest.fixture
def doomed_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child whose third forward ends its process, after a word on stderr and a fake escape on stdout."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from ferrum_mlx.backends.fake import FakeExecutor\n"
        "launch = FakeExecutor._launch\n"
        "def doomed(self, batch):\n"
        "    if len(self.batches) == 2:\n"
        "        print('\\x1b[2J', flush=True)\n"
        "        os.write(2, b'first words\\nout of Metal memory\\n')\n"
        "        os._exit(7)\n"
        "    return launch(self, batch)\n"
        "FakeExecutor._launch = doomed\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("doomed_child")
def test_exit_code_and_last_words_of_a_child_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    with EngineClient.in_process(LONG_CONTEXT) as client:
        client.start(WAIT)
        *deltas, end = client.submit("go on", ENDLESS)
        assert len(deltas) == 2
        assert isinstance(end, Failed)
        assert "exit code 7" in str(end.error)
        assert "out of Metal memory" in str(end.error)
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_of_a_terminal_does_not_reach_the_child() -> None:
    with EngineClient.in_process(FAKE) as client:
        client.start(WAIT)
        assert os.getpgid(child_pid(client)) != os.getpgrp()


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os\n"
        "from ferrum_mlx.client import EngineClient\n"
        "from ferrum_mlx.config import EngineConfig\n"
        "client = EngineClient.in_process(EngineConfig(backend='fake'))\n"
        "client.start()\n"
        "print(client._transport.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=WAIT)
    child = int(parent.stdout)
    until(lambda: is_gone(child))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
