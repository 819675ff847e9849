"""A model's download on a thread of its own; a screen looks at it when it likes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ferrum_mlx import hub
from ferrum_mlx.errors import DownloadStoppedError, FerrumError

_RATE_OVER = 5.0  # seconds


class Download:
    """`done` and `total` are bytes, 0 until the source has said; `said` is the newest line about it.

    The thread is a daemon: a source that has fallen silent does not hold up the end of the program, and
    what has come by then is kept in a `.partial` file.

    Args:
        backend: mlx or torch, whose files are fetched; "" is for the one that this machine would choose.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic, *, backend: str = "") -> None:
        self.model, self._backend = model, backend
        self.done = self.total = 0
        self.said = ""
        self.error: FerrumError | None = None
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # (time, bytes here)
        self._thread = threading.Thread(target=self._run, name=f"download of {model}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it at the next bytes that arrive."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set() and not self.ended.is_set()

    @property
    def rate(self) -> float | None:
        """Bytes a second over the last few; None while nobody can say."""
        seen = list(self._seen)
        if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
            return None
        return (seen[-1][1] - seen[0][1]) / (max(seen[-1][0], self._clock()) - seen[0][0])

    @property
    def rest_s(self) -> float | None:
        """Seconds to the end at that rate."""
        rate = self.rate
        return (self.total - self.done) / rate if rate and rate > 0 else None

    def report(self, done: int, total: int) -> None:
        """Note how far it is.

        Raises:
            DownloadStoppedError: after `stop`.
        """
        if self._stop.is_set():
            raise DownloadStoppedError(f"the download of {self.model} is stopped")
        now = self._clock()
        if done < self.done:  # the source has begun again
            self._seen.clear()
        self.done, self.total = done, total
        self._seen.append((now, done))
        while now - self._seen[0][0] > _RATE_OVER and len(self._seen) > 2:
            self._seen.popleft()

    def _say(self, what: str) -> None:
        self.said = what

    def _run(self) -> None:
        try:
            hub.pull(self.model, backend=self._backend, report=self.report, say=self._say)
        except FerrumError as error:
            self.error = error
        except Exception as error:
            self.error = FerrumError(f"the download of {self.model} failed: {error}", next_step="try again")
        finally:
            self.ended.set()
