"""Who gets in, who waits and why: the answers of an executor to admission and reservation."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ferrum_mlx.errors import FerrumError


@dataclass(frozen=True, slots=True)
class Admitted:
    """`split_at`: a prefill chunk must end there, because the state of recurrent layers is kept there."""

    cache_id: int
    num_cached_tokens: int
    split_at: int | None = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not now: `shortfall` blocks are missing; try again when the capacity version has changed."""

    shortfall: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Never: `reason` says why in words for the user."""

    reason: str


Admission = Admitted | Deferred | Rejected


@dataclass(frozen=True, slots=True)
class NotSubmitted:
    """A step that cannot run as it is: `cache_ids` are to blame, their neighbours may be sent again."""

    error: FerrumError
    cache_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvSlotRequest:
    """Make positions below `target_len` writable.

    `admission_target_len` is a fit check that allocates nothing: the pool must also have room for
    the sequence to reach that length.
    """

    cache_id: int
    target_len: int
    admission_target_len: int = 0


@dataclass(frozen=True, slots=True)
class KvSlotReservation:
    """What a reservation did; blocks_before and _after are by cache_id, summed over the KV groups."""

    block_size: int
    total_blocks: int
    free_blocks_before: int
    free_blocks_after: int
    blocks_before: dict[int, int]
    blocks_after: dict[int, int]


@dataclass(frozen=True, slots=True)
class CacheCompletion:
    """The end of a request that succeeded."""

    request_id: str
    cache_id: int
    prompt_tokens: int
    output_tokens: int


class CapacityVersion:
    """A counter that grows at every release. Read it, probe, then wait for a newer value: a release
    between the probe and the wait has changed the value already, so no wake-up is lost."""

    def __init__(self) -> None:
        self._value = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def value(self) -> int:
        return self._value

    def bump(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """Wait for a value other than `seen`; False when the time is up or the executor is shut down."""
        with self._changed:
            self._changed.wait_for(lambda: self._value != seen or self._closed, timeout)
            return self._value != seen and not self._closed

    def close(self) -> None:
        """Wake every waiter for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
