"""EngineClient over both transports, on the fake backend."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import build
from ferrum_mlx.client import EngineClient, RequestStream
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import BackendUnavailableError, ContextLengthError, EngineDiedError, UsageError
from ferrum_mlx.messages import Command, Delta, Died, Failed, Finished, Ready
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.transport import Post, ProcessTransport

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
    """See that nothing runs and that no block is left in use."""
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


def test_automatic_ids_pass_over_those_in_use(make: Make) -> None:
    client = make(LONG_CONTEXT)
    client.start(WAIT)
    streams = [client.submit("go on", ENDLESS, request_id="2")]
    streams += [client.submit("go on", ENDLESS) for _ in range(2)]
    assert [stream.request_ids for stream in streams] == [("2",), ("1",), ("3",)]
    with pytest.raises(UsageError, match="same"):
        client.submit_all([("a", SHORT), ("b", SHORT)], ["same", "same"])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that this process builds."""
    engines: list[Engine] = []

    def building(*args: object) -> Engine:
        engines.append(real_build(FAKE))
        return engines[-1]

    real_build = build.build_engine
    monkeypatch.setattr(build, "build_engine", building)
    return engines


@pytest.mark.parametrize("crash", [False, True])
def test_engine_is_shut_down_at_its_end(
    built: list[Engine], monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    shut: list[bool] = []
    with EngineClient.in_thread(FAKE) as client:
        client.start(WAIT)
        monkeypatch.setattr(built[0], "shutdown", lambda: shut.append(True))
        if crash:
            monkeypatch.setattr(built[0], "step", lambda: 1 // 0)
            list(client.submit("hello"))
        assert bool(shut) == crash
    assert shut == [True]


@pytest.mark.parametrize(
    ("fault", "of_memory"),
    [
        (ZeroDivisionError("division by zero"), False),
        (MemoryError(), True),
        (RuntimeError("[malloc] Unable to allocate 9 bytes"), True),
        (RuntimeError("CUDA out of memory"), True),
    ],
)
def test_advice_on_memory_is_given_where_memory_is_the_matter(
    built: list[Engine], monkeypatch: pytest.MonkeyPatch, fault: Exception, of_memory: bool
) -> None:
    def step() -> None:
        raise fault

    with EngineClient.in_thread(FAKE) as client:
        client.start(WAIT)
        monkeypatch.setattr(built[0], "step", step)
        (event,) = client.submit("hello")
        assert isinstance(event, Failed)
        assert ("--kv-memory" in str(event.error)) == of_memory


class Scripted:
    """A transport without an engine: the test posts what it would say."""

    posts: list[Post]

    def __init__(self, config: EngineConfig, post: Post) -> None:
        self.posts.append(post)

    def send(self, command: Command) -> None: ...

    def stop(self, patience: float) -> None: ...


@pytest.fixture
def announced() -> Ready:
    with EngineClient.in_thread(FAKE) as client:
        return client.start(WAIT)


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


@pytest.mark.parametrize("form", [EngineClient.in_thread, EngineClient.in_process])
def test_closed_before_its_start_launches_nothing(form: Callable[[EngineConfig], EngineClient]) -> None:
    client = form(FAKE)
    client.close()
    with pytest.raises(EngineDiedError, match="closed"):
        client.start(WAIT)
    assert client._transport is None


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGRTMIN + 6])  # the last: no name
def test_killed_child_fails_its_streams_and_restarts(number: int) -> None:
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
            assert f"killed by signal {int(number)} ({signal.strsignal(number)})" in str(end.error)
            assert "--kv-memory" in str(end.error)
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


def open_files() -> set[str]:
    return set(os.listdir("/dev/fd"))


@pytest.mark.parametrize(("owner", "name"), [(tempfile, "TemporaryFile"), (subprocess, "Popen")])
def test_launch_without_disk_or_processes_is_told_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    client = EngineClient.in_process(FAKE)
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(EngineDiedError, match=r"No space left.*TMPDIR"):
            client.start(WAIT)
    assert open_files() <= before
    with client:
        assert client.restart(WAIT).backend == "fake"


class Unpicklable(str):
    def __reduce__(self) -> str:
        raise pickle.PicklingError("not this one")


def test_request_that_cannot_be_sent_fails_alone() -> None:
    with EngineClient.in_process(FAKE) as client:
        client.start(WAIT)
        (event,) = client.submit(Unpicklable("hello"))
        assert isinstance(event, Failed)
        assert isinstance(event.error, UsageError)
        assert "not this one" in str(event.error)
        assert len(text_of(client.submit("hello", SHORT))) == 12


def test_child_whose_word_cannot_be_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineClient.in_process(LONG_CONTEXT) as client:
        client.start(WAIT)
        transport = client._transport
        assert isinstance(transport, ProcessTransport)

        def unreadable() -> None:
            raise pickle.UnpicklingError("bits have flipped")

        monkeypatch.setattr(transport._pipe, "recv", unreadable)
        end = list(client.submit("go on", ENDLESS))[-1]
        assert isinstance(end, Failed)
        assert "bits have flipped" in str(end.error)
        assert transport._process.returncode is not None


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
