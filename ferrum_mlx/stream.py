"""The events of requests on their way to whoever waits for them: a thread, or a task of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from ferrum_mlx.messages import Abort, Command, Delta, RequestEvent


class Mailbox:
    """Events of one stream: put by the client's thread, taken by any other thread or event loop."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open = set(request_ids)  # requests whose end has not been taken yet
        self.running = self.open.copy()  # those whose end has not come yet
        self._events: deque[RequestEvent] = deque()
        self._arrived = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, event: RequestEvent) -> None:
        with self._arrived:
            if not isinstance(event, Delta):
                self.running.discard(event.request_id)
            if event.request_id in self.open:
                self._events.append(event)
            self._wake()

    def close(self) -> None:
        """Drop what is unread and end every wait."""
        with self._arrived:
            self.open = set()
            self._events.clear()
            self._wake()

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

    Attributes:
        places: of each request by its id, its prompt's index and which sample of that prompt it is.
    """

    def __init__(
        self, places: Mapping[str, tuple[int, int]], mailbox: Mailbox, send: Callable[[Command], None]
    ) -> None:
        self.places = places
        self.request_ids = tuple(places)
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
        for request_id in self._mailbox.running.copy():  # not of one that ended: its id may be in use again
            self._send(Abort(request_id))

    def close(self) -> None:
        """Abort the requests and end every iteration of this stream; idempotent."""
        self._mailbox.close()
        self.abort()

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
