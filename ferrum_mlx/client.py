"""EngineClient: how everything above the engine speaks to it, from any thread or event loop.

One API over two transports (ferrum_mlx.transport): an engine in a thread, or in a child process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError, UsageError
from ferrum_mlx.messages import (
    Abort,
    Command,
    Delta,
    Died,
    Event,
    Failed,
    Finished,
    Loading,
    Prompt,
    Ready,
    RequestEvent,
    Stepped,
    Submit,
)
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.transport import ProcessTransport, ThreadTransport, Transport

_PATIENCE = 5.0  # seconds a ready engine has to finish its step and shut down


class _Mailbox:
    """Events of one stream: put by the client's thread, taken by any other thread or event loop."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open = set(request_ids)  # requests whose end has not been taken yet
        self._events: deque[RequestEvent] = deque()
        self._arrived = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, event: RequestEvent) -> None:
        with self._arrived:
            if event.request_id in self.open:
                self._events.append(event)
            self._wake()

    def close(self) -> set[str]:
        """Drop what is unread and end every wait; returns the requests that were open."""
        with self._arrived:
            was_open, self.open = self.open, set()
            self._events.clear()
            self._wake()
        return was_open

    def take(self) -> RequestEvent | None:
        """The next event, waiting for it; None after the last."""
        with self._arrived:
            while self.open and not self._events:
                self._arrived.wait()
            return self._pop()

    def take_all(self) -> list[RequestEvent]:
        with self._arrived:
            return [event for _ in range(len(self._events)) if (event := self._pop())]

    async def take_async(self) -> RequestEvent | None:
        while True:
            with self._arrived:
                if self._events or not self.open:
                    return self._pop()
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def _pop(self) -> RequestEvent | None:
        if not self._events:
            return None
        event = self._events.popleft()
        if not isinstance(event, Delta):
            self.open.discard(event.request_id)
        return event

    def _wake(self) -> None:
        self._arrived.notify_all()
        for loop, waiter in self._waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_resolve, waiter)
        self._waiters.clear()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RequestStream:
    """The events of one or more requests, ending after each has had its Finished or Failed.

    Iterate it (`for` blocks, `async for` awaits), or `drain()` it from a timer. Closing it, leaving
    its `with` block, or dropping the last reference to it aborts what is still running.
    """

    def __init__(
        self, request_ids: Sequence[str], mailbox: _Mailbox, send: Callable[[Command], None]
    ) -> None:
        self.request_ids = tuple(request_ids)
        self._mailbox = mailbox
        self._send = send

    @property
    def ended(self) -> bool:
        """Every request's last event has been taken, or the stream was closed."""
        return not self._mailbox.open

    def drain(self) -> list[RequestEvent]:
        """What has arrived since the last call; never waits."""
        return self._mailbox.take_all()

    def abort(self) -> None:
        """Ask the engine to end the requests; their last event (reason "abort") still comes."""
        for request_id in self._mailbox.open.copy():
            self._send(Abort(request_id))

    def close(self) -> None:
        """Abort the requests and end every iteration of this stream; idempotent."""
        for request_id in self._mailbox.close():
            self._send(Abort(request_id))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestEvent:
        event = self._mailbox.take()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        event = await self._mailbox.take_async()
        if event is None:
            raise StopAsyncIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.abort()  # puts on a SimpleQueue only: no lock is taken in a finalizer


class EngineClient:
    """An engine, wherever it runs. All methods may be called from any thread.

    Args:
        config: the engine's settings.
        transport: how the engine runs; `in_thread` and `in_process` choose it.
        on_loading: told each stage of the engine's start, in words; called from another thread.
        on_died: told why an engine ended that nobody closed; called from another thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        transport: type[Transport],
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
    ) -> None:
        self.config = config
        self.on_loading = on_loading
        self.on_died = on_died
        self._transport_type = transport
        self._transport: Transport | None = None
        self._life = 0  # counts engines, so that a late word of an old one is not taken for the new one's
        self._changed = threading.Condition(threading.RLock())
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ready: Ready | None = None
        self._death: FerrumError | None = None
        self._last_step: StepStats | None = None
        self._numbers = itertools.count(1)

    @classmethod
    def in_thread(
        cls,
        config: EngineConfig,
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
    ) -> Self:
        """An engine in a thread of this process."""
        return cls(config, ThreadTransport, on_loading, on_died)

    @classmethod
    def in_process(
        cls,
        config: EngineConfig,
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
    ) -> Self:
        """An engine in a spawned child process, whose death this process survives."""
        return cls(config, ProcessTransport, on_loading, on_died)

    @property
    def ready(self) -> Ready | None:
        """What the engine announced; None while it loads and after it died."""
        return self._ready if self._death is None else None

    @property
    def death(self) -> FerrumError | None:
        """Why the engine ended; None while it loads or runs."""
        return self._death

    @property
    def last_step(self) -> StepStats | None:
        """The engine's latest step; None before its first."""
        return self._last_step

    def start(self, timeout: float | None = None) -> Ready:
        """Start the engine, unless it runs, and wait until it accepts requests.

        Raises:
            FerrumError: what ended the build, or EngineDiedError after `timeout` seconds, where no
                process can be started, and after `close`.
        """
        with self._changed:
            if self._transport is None and self._death is None:
                self._launch()
            if not self._changed.wait_for(lambda: self._ready or self._death, timeout):
                raise EngineDiedError(f"the engine was not ready after {timeout:g} s")
            if self._death is not None:
                raise self._death
            assert self._ready is not None
            return self._ready

    def restart(self, timeout: float | None = None) -> Ready:
        """Bring up a new engine in place of one that died, failed to start or was closed; see `start`."""
        self.close()
        with self._changed:
            self._transport, self._ready, self._death, self._last_step = None, None, None, None
            self._launch()
        return self.start(timeout)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestStream:
        """Queue one request; see `submit_all`."""
        return self.submit_all([(prompt, params or SamplingParams())], [request_id] if request_id else None)

    def submit_all(
        self, requests: Sequence[tuple[Prompt, SamplingParams]], request_ids: Sequence[str] | None = None
    ) -> RequestStream:
        """Queue requests whose events come in one stream, in the order they happen.

        An engine that still loads takes them when it is ready. A request that cannot run, for want
        of an engine or a fault of its own, ends in Failed.

        Raises:
            UsageError: a request_id that is in use.
        """
        with self._changed:
            ids = list(request_ids or (self._free_id() for _ in requests))
            taken = [i for i, count in Counter(ids).items() if count > 1 or i in self._mailboxes]
            if taken:
                raise UsageError(f"request_id is {taken[0]!r}", "allowed: one that no open request has")
            mailbox = _Mailbox(ids)
            for request_id, (prompt, params) in zip(ids, requests, strict=True):
                if self._transport is None or self._death is not None:
                    error = self._death or EngineDiedError(
                        "the engine is not started", next_step="call start()"
                    )
                    mailbox.put(Failed(request_id, error))
                else:
                    self._mailboxes[request_id] = mailbox
                    self._transport.send(Submit(request_id, prompt, params))
        return RequestStream(ids, mailbox, self._send)

    def close(self) -> None:
        """End the engine and every open stream; idempotent, and bounded in time."""
        with self._changed:
            transport = self._transport
            patience = _PATIENCE if self.ready else 0.0  # a build cannot be interrupted, so is not waited for
            self._die(EngineDiedError("the engine is closed", next_step="call restart(), or make a new one"))
            self._life += 1
        if transport is not None:
            transport.stop(patience)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free_id(self) -> str:
        return next(i for i in map(str, self._numbers) if i not in self._mailboxes)

    def _launch(self) -> None:
        self._life += 1
        life = self._life
        atexit.register(self.close)
        self._transport = self._transport_type(self.config, lambda events: self._dispatch(life, events))

    def _send(self, command: Command) -> None:
        transport = self._transport
        if transport is not None:
            transport.send(command)

    def _dispatch(self, life: int, events: Sequence[Event]) -> None:
        for event in events:
            with self._changed:
                if life != self._life:
                    return
                self._take(event)
            match event:
                case Loading(what) if self.on_loading:
                    self.on_loading(what)
                case Died(error) if self.on_died and error is self._death:  # a second Died is an echo
                    self.on_died(error)

    def _take(self, event: Event) -> None:
        if self._death is not None:  # its streams have had their end
            return
        match event:
            case Delta(request_id):
                self._mailboxes[request_id].put(event)
            case Finished(request_id) | Failed(request_id):
                self._mailboxes.pop(request_id).put(event)
            case Stepped(stats):
                self._last_step = stats
            case Ready():
                self._ready = event
                self._changed.notify_all()
            case Died(error):
                self._die(error)

    def _die(self, error: FerrumError) -> None:
        if self._death is not None:  # closed after a death, or twice
            return
        self._death = error
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(Failed(request_id, error))
        self._mailboxes.clear()
        self._changed.notify_all()
