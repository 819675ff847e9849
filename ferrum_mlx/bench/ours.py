"""This engine as a system under test: `Engine.step` in this thread, one moment for all tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import cast

from ferrum_mlx.bench.trace import Trace
from ferrum_mlx.bench.workloads import Arrival, Arriving, Case
from ferrum_mlx.capacity import Admission
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Stepped, Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.speculation import Speculation
from ferrum_mlx.verify.runs import Subject, engine_over


class Cold:
    """An executor that finds nothing in its prefix cache: the same text can be measured twice."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def try_admit_prefill(
        self, request_id: str, prompt: Sequence[int], *, use_prefix: bool = True, adapter: str = ""
    ) -> Admission:
        return self._executor.try_admit_prefill(request_id, prompt, use_prefix=False, adapter=adapter)


@dataclass(frozen=True, slots=True)
class Ours:
    """`config` may differ from the subject's in what an engine reads: all engines are over one executor.

    What is measured goes through `adapter`; `answer`, which peers are asked for too, through none.
    """

    subject: Subject
    config: EngineConfig
    adapter: str = ""
    name: str = "ferrum-mlx"
    same_weights: bool = True

    @property
    def speculation(self) -> Speculation | None:
        """The engine's own, kept from run to run: it learns what drafts cost on this machine."""
        return None if self.config.speculative == "off" else self.subject.engine.speculation

    def method(self, case: Case) -> str:
        return "" if self.config.speculative == "off" else self.config.speculative

    def refusal(self, case: Case) -> str:
        return ""

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        executor = self.subject.executor
        executor.reset_peak_memory()
        before = self.speculation and self.speculation.stats()
        engine = self._engine(case)
        run = drive(engine, arrivals, until_first_end=case.until_first_end, adapter=self.adapter)
        after = self.speculation and self.speculation.stats()
        run.peak_memory_bytes = executor.status().peak_memory_bytes
        if before and after:
            run.drafts = after.verifies - before.verifies
            run.drafted = after.drafted - before.drafted
            run.accepted = after.accepted - before.accepted
        return run

    def answer(self, case: Case, prompt: Sequence[int]) -> list[int]:
        """The greedy answer up to its end of sequence, or as long as the case has it."""
        arrivals = [Arrival("answer", prompt, case.tokens)]
        return drive(self._engine(case), arrivals, ignore_eos=False).streams[0].ids

    def close(self) -> None:
        """The engine is its builder's."""

    def _engine(self, case: Case) -> Engine:
        executor, config = self.subject.executor, self.config
        if case.kind == "text":
            executor = cast(ModelExecutor, Cold(executor))
        if case.kind == "tg":  # the prompts are not measured: take them in whole steps
            config = replace(config, prefill_while_decoding=config.max_prefill_chunk)
        return engine_over(self.subject, executor, config, self.speculation)


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    until_first_end: bool = False,
    ignore_eos: bool = True,
    adapter: str = "",
) -> Trace:
    """Serve the requests as they fall due.

    Raises:
        FerrumError: one failed.
    """
    run, arriving = Trace(), Arriving(arrivals)
    while True:
        for arrival, stream in arriving.due(run, perf_counter()):
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=ignore_eos)
            engine.submit(Submit(arrival.name, stream.prompt, params, adapter=adapter))
        if not engine.has_work():
            break
        events = engine.step()
        ended = _take(run, events, perf_counter())
        if until_first_end and ended:
            break
    for stream in run.streams:
        engine.abort(stream.name)  # those that ended are unknown to it
    while engine.has_work():
        engine.step()
    if arriving and not until_first_end:
        raise FerrumError("a request of the workload was never due")
    return run


def _take(run: Trace, events: Sequence[Event], now: float) -> bool:
    """Add a step's tokens; whether a stream has ended."""
    streams = {stream.name: stream for stream in run.streams}
    ended = False
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta):
            streams[event.request_id].add(now, event.token_ids)
        elif isinstance(event, Finished):
            stream = streams[event.request_id]
            stream.ended = ended = True
            stream.cached_tokens = event.usage.cached_tokens
        elif isinstance(event, Stepped) and event.stats.decode_tokens and not event.stats.prefill_tokens:
            run.step_s += event.stats.seconds
            run.forward_s += event.stats.forward_s
    return ended
