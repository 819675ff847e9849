"""Systems to test the bench with: the fake engine on a scripted clock, and peers that are scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.bench import ours
from ferrum_mlx.bench.trace import Stream, Trace
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import Pending
from ferrum_mlx.verify.runs import Subject


class Clock:
    """Seconds that go by with the tokens that are computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def slow_engine(clock: Clock, **settings: Any) -> Engine:
    """Over a fake that takes a second a token."""

    class Slow(FakeExecutor):
        def _launch(self, batch: UnifiedBatch) -> Pending:
            clock.now += batch.num_tokens
            return super()._launch(batch)

    config = EngineConfig(**({"backend": "fake", "max_model_len": 4096} | settings))
    executor = Slow(config)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="a test")


def slow_subject(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Subject:
    clock = Clock()
    monkeypatch.setattr(ours, "perf_counter", clock)
    engine = slow_engine(clock, **settings)
    return Subject(
        engine, FakeCodec(), EngineConfig(**({"backend": "fake", "max_model_len": 4096} | settings))
    )


class Script:
    """A system whose tokens come at given intervals; `log` gets its name and the case's at every run."""

    def __init__(
        self,
        name: str,
        log: list[tuple[str, str]],
        *,
        gap: float = 1.0,
        ids: Callable[[Arrival], Sequence[int]] = lambda arrival: range(arrival.max_tokens),
        same_weights: bool = False,
        refuses: str = "",
        error: Exception | None = None,
    ) -> None:
        self.name, self.same_weights = name, same_weights
        self._log, self._gap, self._ids, self._refuses, self._error = log, gap, ids, refuses, error
        self.closed = False

    def method(self, case: Case) -> str:
        return "by script"

    def refusal(self, case: Case) -> str:
        return self._refuses

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        self._log.append((self.name, case.name))
        if self._error is not None:
            raise self._error
        return Trace([self._stream(arrival) for arrival in arrivals])

    def close(self) -> None:
        self.closed = True

    def _stream(self, arrival: Arrival) -> Stream:
        times = [self._gap * (i + 1) for i in range(arrival.max_tokens)]
        return Stream(arrival.name, list(arrival.prompt), 0.0, times, list(self._ids(arrival)), ended=True)
