"""Where an engine lives: a thread of this process, or a child process.

Both run `serve`, the one loop that owns an engine: it obeys what is queued, steps while there is
work and sleeps when there is none. Sending a command is one `SimpleQueue.put`, which never blocks
and may be called from any thread, an event loop or a finalizer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, Protocol

from ferrum_mlx.child_process import end, how_it_ended, last_line, launch
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError, UsageError, shown
from ferrum_mlx.events import Callback, CallbackSink
from ferrum_mlx.messages import (
    Abort,
    Answer,
    Answered,
    Ask,
    AskKVMap,
    AskTokenCount,
    AskView,
    Command,
    Died,
    Event,
    Failed,
    Hold,
    Loading,
    Question,
    Shutdown,
    Submit,
)

if TYPE_CHECKING:
    from ferrum_mlx.engine import Engine

Post = Callable[[Sequence[Event]], None]
Inbox = queue.SimpleQueue[Command]

_ADVICE = "if it happens again, lower --kv-memory or take a smaller model"
_SHORT_OF_MEMORY = re.compile("memory|alloc", re.IGNORECASE)  # as MLX, torch and Python word it
_GRACE = 1.0  # seconds a child has after each of: closed pipe, SIGTERM
_GRACE_AT_EXIT = 10.0  # seconds a thread has to leave the array library's code


class _Unheard(BaseException):
    """Nobody listens to the engine any more: raised out of a build or a step, which may catch Exception."""


def serve(config: EngineConfig, inbox: Inbox, post: Post, on_event: Callback | None = None) -> None:
    """Build an engine and run it until Shutdown; any other end is posted as Died.

    Args:
        on_event: given each record of the engine, in this thread.
    """
    try:
        _build_and_run(config, inbox, post, on_event)
    except FerrumError as error:
        post([Died(error)])
    except BaseException as fault:  # a thread that ended without a word would leave its streams waiting
        post([Died(_unexpected(fault))])


def _build_and_run(config: EngineConfig, inbox: Inbox, post: Post, on_event: Callback | None) -> None:
    from ferrum_mlx.build import build_engine

    engine = build_engine(config, lambda what: post([Loading(what)]))
    if on_event is not None:
        engine.log.attach(CallbackSink(on_event))
    try:
        post([engine.ready()])
        while _obey(engine, inbox, post):
            post(engine.step())
    finally:
        engine.shutdown()


def _obey(engine: Engine, inbox: Inbox, post: Post) -> bool:
    """Carry out every queued command, waiting for one while there is no work or a Hold; False at Shutdown."""
    held_until = 0.0
    while True:
        held = held_until - monotonic()
        try:
            command = inbox.get(timeout=held) if held > 0 else inbox.get(block=not engine.has_work())
        except queue.Empty:
            if held > 0:
                continue
            return True
        match command:
            case Submit():
                engine.submit(command)
            case Abort(request_id):
                engine.abort(request_id)
                held_until = 0.0
            case Hold(seconds):
                held_until = monotonic() + seconds
            case Ask(number, question):
                post([Answered(number, _answer(engine, question))])
            case Shutdown():
                return False


def _answer(engine: Engine, question: Question) -> Answer:
    try:
        match question:
            case AskKVMap():
                return engine.executor.kv_map()
            case AskView():
                return engine.view()
            case AskTokenCount(prompt, chat):
                return engine.count_tokens(prompt, chat)
    except FerrumError as error:
        return error
    except Exception as fault:  # a picture of the engine is not worth the requests in it
        return _unexpected(fault)


def _unexpected(fault: BaseException) -> EngineDiedError:
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    said = " ".join(str(fault).split())
    what = f"the engine failed: {type(fault).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"
    short = isinstance(fault, MemoryError) or _SHORT_OF_MEMORY.search(said)
    error = EngineDiedError(what, next_step=_ADVICE if short else "set FERRUM_DEBUG=1 for the traceback")
    error.add_note("".join(traceback.format_exception(fault)))  # for FERRUM_DEBUG: survives the pipe
    return error


class Transport(Protocol):
    """A running engine; its events reach the `post` given at construction in order, from one thread.

    A request that cannot be sent to it fails from another one.
    """

    def __init__(self, config: EngineConfig, post: Post) -> None: ...

    def send(self, command: Command) -> None:
        """Queue a command; never blocks, and is lost without a word once the engine is gone."""
        ...

    def stop(self, patience: float) -> None:
        """End the engine; waits `patience` seconds for it to do so itself."""
        ...


class _Owner:
    """A thread that runs one engine after another and never ends by itself.

    MLX keeps state a thread whose destructor wants the GIL. It runs when the thread ends, which on
    Python before 3.13 may be after `Thread.join` has returned; an interpreter that is shutting down
    by then aborts the process. So a free thread waits for the next engine instead.
    """

    _free: ClassVar[list[_Owner]] = []

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="ferrum-engine", daemon=True)
        self.thread.start()

    @classmethod
    def run(cls, job: Callable[[], None]) -> _Owner:
        """Give the job to a free thread, or to a new one."""
        try:
            owner = cls._free.pop()
        except IndexError:
            owner = cls()
        owner._jobs.put(job)
        return owner

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._free.append(self)


class ThreadTransport:
    """An engine in a thread of this process, in which `on_event` is given the engine's records.

    Stopped while it loads, it ends at the next stage of that.
    """

    _at_work: ClassVar[set[threading.Event]] = set()  # each is set when an engine has ended

    def __init__(self, config: EngineConfig, post: Post, on_event: Callback | None = None) -> None:
        self._inbox: Inbox = queue.SimpleQueue()
        self._done = threading.Event()
        self._stopped = False
        self._at_work.add(self._done)
        self._owner = _Owner.run(lambda: self._serve(config, post, on_event))

    @classmethod
    def wait_at_exit(cls) -> None:
        """Let stopped engines end: before Python 3.14 a thread that wants the GIL of an interpreter that
        shuts down is unwound, and where it is in an array library's code that aborts the process."""
        for done in cls._at_work.copy():
            done.wait(_GRACE_AT_EXIT)

    def _serve(self, config: EngineConfig, post: Post, on_event: Callback | None) -> None:
        def tell(events: Sequence[Event]) -> None:
            if self._stopped:
                raise _Unheard
            post(events)

        try:
            with contextlib.suppress(_Unheard):
                serve(config, self._inbox, tell, on_event)
        finally:
            self._at_work.discard(self._done)
            self._done.set()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def stop(self, patience: float) -> None:
        self._stopped = True
        self._inbox.put(Shutdown())
        if self._owner.thread is not threading.current_thread():
            self._done.wait(patience)


atexit.register(ThreadTransport.wait_at_exit)  # so after the clients' own, which stop their engines


class ProcessTransport:
    """An engine in a child process: it may abort, be killed or hold its GIL without harm to this one.

    The last line of what it wrote is told when it dies.
    """

    def __init__(self, config: EngineConfig, post: Post) -> None:
        try:
            self._process, self._pipe, self._log = launch("ferrum_mlx.transport:child")
        except OSError as error:
            raise EngineDiedError(
                f"the engine's process cannot be started: {error}", next_step="check disk space and TMPDIR"
            ) from error
        self._outbox: Inbox = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._read, args=(post,), name="ferrum-events", daemon=True),
            threading.Thread(target=self._write, args=(config, post), name="ferrum-commands", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def stop(self, patience: float) -> None:
        self._outbox.put(Shutdown())
        self._end_child(patience)
        for thread in self._threads:  # both end with the child
            if thread is not threading.current_thread():
                thread.join(_GRACE)
        if not any(thread.is_alive() for thread in self._threads):
            with self._closing:  # several threads may stop it at once
                self._pipe.close()  # earlier, a late write could go to whatever file took its number
                self._log.close()

    def _end_child(self, patience: float) -> None:
        end(self._process, patience, _GRACE)

    def _write(self, config: EngineConfig, post: Post) -> None:
        try:
            self._pipe.send(config)
            while True:
                command = self._outbox.get()
                self._send(command, post)
                if isinstance(command, Shutdown):
                    return
        except OSError:  # the child is gone; the reader tells
            return

    def _send(self, command: Command, post: Post) -> None:
        try:
            self._pipe.send(command)
        except OSError:
            raise
        except Exception as fault:  # it cannot be pickled, so nothing of it was written
            error = UsageError(
                f"the prompt cannot be sent to the engine's process: {fault}",
                "allowed: a prompt of plain texts, token ids or messages",
            )
            if isinstance(command, Submit):
                post([Failed(command.request_id, error)])
            elif isinstance(command, Ask):
                post([Answered(command.number, error)])

    def _read(self, post: Post) -> None:
        try:
            while (events := self._receive()) is not None:
                post(events)
            self._end_child(_GRACE)
            error = self._obituary()
        except Exception as fault:
            self._end_child(0.0)
            error = _unexpected(fault)
        post([Died(error)])

    def _receive(self) -> Sequence[Event] | None:
        """The child's next events; None when it has closed its end."""
        try:
            events: Sequence[Event] = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return events

    def _obituary(self) -> EngineDiedError:
        what = how_it_ended("the engine's process", self._process.returncode)
        last = last_line(self._log)
        return EngineDiedError(f"{what}, last saying {shown(last)}" if last else what, next_step=_ADVICE)


def child() -> None:
    """The main function of a child process; its argument is its end of the socket."""
    pipe = Connection(int(sys.argv[1]))
    config = pipe.recv()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    serve(config, inbox, pipe.send)


def _listen(pipe: Connection, inbox: Inbox) -> None:
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone: nobody is left to serve, whatever the engine is doing
