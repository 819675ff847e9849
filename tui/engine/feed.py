"""What the screen knows of an engine: one place that asks, any number of widgets that show."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ferrum_mlx.client import EngineClient
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Ready
from ferrum_mlx.metrics import Latencies, StepStats
from ferrum_mlx.totals import Totals
from ferrum_mlx.view import EngineView

from .history import History, Sample

_ASK_TIMEOUT = 30.0  # seconds; a death ends the wait at once
_AT_ONCE = 0.02  # seconds in which an answer is shown together with the numbers that need none


@dataclass(frozen=True, slots=True)
class TTFT:
    """Seconds to the first token: of the last request that has one, and of the latest 256."""

    last: float
    p50: float
    p99: float


class EngineFeed:
    """The newest numbers of one engine, and its last minute.

    Everything here belongs to the screen's own thread. Whoever refreshes it does so at most four times
    a second while the engine works and once when that is over; between, it does nothing at all.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watchers: list[Callable[[], None]] = []
        self._life = 0
        self._begin(client)

    def _begin(self, client: EngineClient) -> None:
        self.client = client
        self.ready: Ready | None = client.ready
        self.step: StepStats | None = None
        self.view: EngineView | None = None
        self.totals = Totals()
        self.history = History()
        self._asking: asyncio.Task[None] | None = None
        self._seen: object = None  # the state of the engine that is shown
        self._viewed: StepStats | None = None  # the step that the view came after
        self._life += 1

    def attach(self, client: EngineClient) -> None:
        """Look at another engine, or at a new one of the same client; its past is its own."""
        self._begin(client)
        self._tell()

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Call it after each change, in the screen's thread."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    async def refresh(self) -> None:
        """Take what is new. Never waits for a step: its view is shown when it comes."""
        client = self.client
        state = client.ready, client.last_step
        if state != self._seen:
            self._take(*state)
        ready, step = state
        if ready is None or (self.view is not None and self._viewed is step):
            return
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(self._life))
        await asyncio.wait([self._asking], timeout=_AT_ONCE)

    def _take(self, ready: Ready | None, step: StepStats | None) -> None:
        self._seen = ready, step
        self.ready, self.step = ready, step
        self.totals = self.client.totals()
        if ready is None:
            self.view, self._viewed = None, None
        kv = step.kv if step else None
        share = kv.used_blocks / kv.total_blocks if kv and kv.total_blocks else 0.0
        totals = self.totals
        sample = Sample(self._clock(), totals.decode_tokens, totals.prefill_tokens, share, self.busy)
        self.history.add(sample)
        self._tell()

    async def _ask(self, life: int) -> None:
        client, step = self.client, self.client.last_step
        view: EngineView | None = None
        with contextlib.suppress(FerrumError):  # busy beyond patience, or gone, which its owner tells
            view = await asyncio.to_thread(client.view, _ASK_TIMEOUT)
        if life != self._life:
            return
        self._asking = None
        state = client.ready, client.last_step
        if state != self._seen and not _works(*state):  # nobody refreshes an idle engine again
            self._take(*state)
        if view is not None and client.ready is not None:
            self.view, self._viewed = view, step
            self._tell()
            if step is not client.last_step and not self.busy:
                self._asking = asyncio.create_task(self._ask(life))

    def _tell(self) -> None:
        for watcher in self._watchers.copy():
            watcher()

    # Figures

    @property
    def busy(self) -> bool:
        return _works(self.ready, self.step)

    @property
    def now_tps(self) -> float:
        """Output tokens a second of all requests, now."""
        return self.history.now_tps if self.busy else 0.0

    @property
    def ttft(self) -> TTFT | None:
        """None before the first token of the first request."""
        times = list(self.totals.latest_ttft_s)
        running = [request.ttft_s for request in self.view.requests if request.ttft_s] if self.view else []
        if not times and not running:
            return None
        ordered = sorted(times + running)
        return TTFT((running or times)[-1], _rank(ordered, 50), _rank(ordered, 99))

    @property
    def itl(self) -> Latencies | None:
        """Gaps between tokens, the latest of what runs, or all of the last request."""
        if self.view is not None and self.view.itl.count:
            return self.view.itl
        last = self.totals.last_request
        return last.itl if last is not None and last.itl.count else None

    @property
    def prefill_tps(self) -> float:
        """Of the request in prefill, or of the last one that was; 0.0 before any."""
        requests = self.view.requests if self.view else ()
        running = [request.tokens_per_second for request in requests if request.state == "prefill"]
        last = self.totals.last_request
        return running[0] if running and running[0] else last.timings.prefill_tps if last else 0.0


def _works(ready: Ready | None, step: StepStats | None) -> bool:
    return ready is not None and step is not None and bool(step.running or step.waiting)


def _rank(ordered: list[float], percent: int) -> float:
    """The smallest value that at least that share of the values do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
