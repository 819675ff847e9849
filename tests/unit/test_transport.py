"""How the engine behind an EngineClient is launched, dies and ends: in a thread, in a child process."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import EngineDiedError, UsageError
from ferrum_mlx.messages import Failed
from ferrum_mlx.transport import ProcessTransport

from .client_driver import ENDLESS, FAKE, LONG_CONTEXT, SHORT, WAIT, first_delta, text_of, until


def test_both_transports_say_the_same() -> None:
    with EngineClient.in_thread(FAKE) as here, EngineClient.in_process(FAKE) as there:
        here.start(WAIT)
        there.start(WAIT)
        assert text_of(here.submit("hello", SHORT)) == text_of(there.submit("hello", SHORT))


@pytest.mark.parametrize("form", [EngineClient.in_thread, EngineClient.in_process])
def test_closed_before_its_start_launches_nothing(form: Callable[[EngineConfig], EngineClient]) -> None:
    client = form(FAKE)
    client.close()
    with pytest.raises(EngineDiedError, match="closed"):
        client.start(WAIT)
    assert client._transport is None


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


def child_pid(client: EngineClient) -> int:
    assert isinstance(client._transport, ProcessTransport)
    return client._transport.pid


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
