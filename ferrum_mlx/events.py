"""What happens in an engine, as records for other programs: one a step, one a request's transition.

They go to sinks: a callback, or a file of JSON lines (`--events FILE`). A line is one object with

    event        which of the below
    time         when, in seconds since the epoch
    monotonic    when, in seconds of a clock that is never set; compare those of one engine only

and, besides, by event:

    queued       request_id, prompt_tokens, priority, adapter ("" without one)
    admitted     request_id, tokens (of the prompt), cached_tokens (of those, found in the prefix cache)
    preempted    request_id, computed_tokens (given up with its blocks)
    resumed      request_id, tokens (prompt and output so far), cached_tokens
    first_token  request_id, ttft_s
    finished, aborted, failed
                 request_id, reason ("stop", "length", "abort", "error"), error (a text, "" without one),
                 stats: a metrics.RequestStats, or null for a request that was refused as it came
    step         stats: a metrics.StepStats

The file is written at each step and when the engine ends, never synced: what a killed process loses
is the step it was in. A file is appended to; a disk that was full may have left a line cut short. A
request without an end was open when the engine ended.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from time import perf_counter
from time import time as wall_clock
from typing import Any, ClassVar, Protocol

from ferrum_mlx.errors import FerrumError, shown
from ferrum_mlx.metrics import RequestStats, StepStats

_ENDS = {"abort": "aborted", "error": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    time: float = field(default_factory=wall_clock)
    monotonic: float = field(default_factory=perf_counter)


@dataclass(frozen=True, slots=True)
class RequestQueued(_Record):
    event: ClassVar[str] = "queued"
    request_id: str
    prompt_tokens: int
    priority: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class RequestAdmitted(_Record):
    """The first admission of a request."""

    event: ClassVar[str] = "admitted"
    request_id: str
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPreempted(_Record):
    event: ClassVar[str] = "preempted"
    request_id: str
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResumed(_Record):
    """The admission of a request that was preempted."""

    event: ClassVar[str] = "resumed"
    request_id: str
    tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken(_Record):
    event: ClassVar[str] = "first_token"
    request_id: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class RequestEnded(_Record):
    """`stats` is None for a request that was refused before it was queued."""

    request_id: str
    reason: str
    stats: RequestStats | None
    error: str = ""

    @property
    def event(self) -> str:
        return _ENDS.get(self.reason, "finished")


@dataclass(frozen=True, slots=True)
class StepDone(_Record):
    event: ClassVar[str] = "step"
    stats: StepStats


Transition = RequestQueued | RequestAdmitted | RequestPreempted | RequestResumed | FirstToken | RequestEnded
Record = Transition | StepDone
Callback = Callable[[Record], None]


class EventSink(Protocol):
    """Takes records in the order they happen, all from the engine's thread. May raise: see EventLog."""

    def record(self, record: Record) -> None: ...

    def close(self) -> None: ...


class CallbackSink:
    """Hands each record to a function, in the engine's thread: a slow one slows every request."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def record(self, record: Record) -> None:
        self._callback(record)

    def close(self) -> None:
        pass

    def __str__(self) -> str:
        return "the callback for events"


class JsonlSink:
    """Appends to a file; the module says what a line holds.

    Raises:
        FerrumError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            torn = _ends_inside_a_line(Path(path))
            # Never waits for who reads a pipe: nobody is an error, and a full pipe is like a full disk.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            self._file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        except OSError as error:
            raise FerrumError(
                f"the events file {shown(path)} cannot be written: {error.strerror}",
                next_step="give --events a file in a folder that can be written",
            ) from error
        self._lines = [b"\n"] if torn else []

    def record(self, record: Record) -> None:
        self._lines.append(to_json(record).encode() + b"\n")
        if isinstance(record, StepDone):
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()

    def __str__(self) -> str:
        return f"the events file {shown(self._path)}"

    def _flush(self) -> None:
        data, self._lines = memoryview(b"".join(self._lines)), []
        while data:  # a write to a full disk or a pipe may take a part
            written = self._file.write(data)
            if written is None:
                raise BlockingIOError("nobody reads the pipe fast enough")
            data = data[written:]


def _ends_inside_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def to_json(record: Record) -> str:
    """The line of a record, without its end."""
    return json.dumps({"event": record.event} | _as_dict(record), default=_as_dict)


def _as_dict(value: object) -> dict[str, Any]:
    assert is_dataclass(value)
    return {each.name: getattr(value, each.name) for each in fields(value)}


class EventLog:
    """The sinks of one engine. One that fails is said so, once, and left out from then on."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = list(sinks)
        self._notes: list[str] = []

    def __bool__(self) -> bool:
        """Whether anybody listens; where nobody does, no record need be made."""
        return bool(self._sinks)

    def attach(self, sink: EventSink) -> None:
        self._sinks.append(sink)

    def add(self, *records: Record) -> None:
        for sink in self._sinks.copy():
            try:
                for record in records:
                    sink.record(record)
            except Exception as error:  # a full disk, a closed file, whatever a callback raises
                self._drop(sink, error)

    def take_notes(self) -> list[str]:
        """What a user must be told since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        for sink in self._sinks.copy():
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: EventSink, error: Exception) -> None:
        self._sinks.remove(sink)
        with contextlib.suppress(Exception):  # what it held is lost already
            sink.close()
        said = " ".join(str(error).split())
        self._notes.append(f"{sink} failed and is off from here on: {type(error).__name__}: {said}")


def open_log(path: str) -> EventLog:
    """The log of an engine whose EngineConfig.events is `path`; "" writes no file.

    Raises:
        FerrumError: the file cannot be opened.
    """
    return EventLog(JsonlSink(path)) if path else EventLog()
