"""The loop that joins scheduler and executor: submit, step, abort. One thread owns it.

A step is planned, submitted and landed, which is to take its results in. Where the executor wants it, a
step is submitted before the one before it has landed, unless a request's next row depends on what it
will have said: its drafts, its penalties.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

from ferrum_mlx.batch import ItemResult, UnifiedBatch
from ferrum_mlx.capacity import Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError, one_line
from ferrum_mlx.events import (
    EventLog,
    FirstToken,
    RequestAdmitted,
    RequestEnded,
    RequestPreempted,
    RequestQueued,
    StepDone,
)
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.intake import Intake
from ferrum_mlx.launched import Launched, Work, item_of
from ferrum_mlx.messages import (
    ChatOptions,
    Delta,
    Event,
    Failed,
    Finished,
    Notice,
    Prompt,
    Ready,
    Stepped,
    Submit,
)
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.output import OutputStream, TextCodec
from ferrum_mlx.request import Request, RequestState
from ferrum_mlx.scheduler import Change, Scheduled, Scheduler
from ferrum_mlx.speculative.accept import accepted
from ferrum_mlx.timing import latencies
from ferrum_mlx.view import VIEWED_GAPS, VIEWED_REQUESTS, EngineView

if TYPE_CHECKING:
    from ferrum_mlx.speculative.speculation import Speculation


class Engine:
    """Built by `build.build_engine`; `backend_reason` and `notes` are what a user must be told."""

    def __init__(
        self,
        executor: ModelExecutor,
        codec: TextCodec,
        config: EngineConfig,
        *,
        backend: str,
        backend_reason: str,
        notes: Sequence[str] = (),
        log: EventLog | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.executor = executor
        self.log = log or EventLog()
        capacity = executor.capabilities().kv_capacity
        self._intake = Intake(codec, executor.info.vocab_size, capacity, config.adapter_names)
        self._scheduler = Scheduler(executor, config)
        self._backend, self._backend_reason, self._notes = backend, backend_reason, tuple(notes)
        self.speculation = speculation
        self._one_step_ahead = executor.capabilities().one_step_ahead
        self._launched: deque[Launched] = deque()
        self._landed = 0.0  # when the latest step did
        self._streams: dict[str, OutputStream] = {}
        self._events: list[Event] = []  # of now; the next step delivers them
        self._steps = 0

    def ready(self) -> Ready:
        return Ready(
            info=self.executor.info,
            backend=self._backend,
            backend_reason=self._backend_reason,
            max_model_len=self.executor.capabilities().kv_capacity,
            kv=self.executor.kv_capacity_snapshot(),
            notes=self._notes,
            capabilities=self.executor.capabilities(),
            memory=self.executor.memory(),
            memory_limit_bytes=self.executor.status().memory_limit_bytes,
            speculation=self.speculation.name if self.speculation else "",
        )

    def view(self) -> EngineView:
        """What there is to see now; costs time linear in the KV blocks."""
        now = perf_counter()
        requests = self._scheduler.requests()
        streams = [self._streams[request.request_id] for request in requests[:VIEWED_REQUESTS]]
        gaps = [gap for stream in streams for gap in stream.timer.latest_gaps(VIEWED_GAPS // len(streams))]
        status = self.executor.status()
        return EngineView(
            kv=self.executor.kv_map(),
            requests=tuple(stream.view(now) for stream in streams),
            more_requests=len(requests) - len(streams),
            itl=latencies(gaps),
            memory_bytes=status.memory_bytes,
            peak_memory_bytes=status.peak_memory_bytes,
        )

    def count_tokens(self, prompt: Prompt, chat: ChatOptions) -> int:
        """How many tokens a prompt has as it would be submitted.

        Raises:
            FerrumError: it cannot be one.
        """
        try:
            return self._intake.count(prompt, chat)
        except Exception as error:  # a tokenizer or a template raises what it likes
            raise _failure("the prompt", error) from error

    def submit(self, command: Submit) -> None:
        """Queue a request. What is wrong with it comes back as its Failed event."""
        name = command.request_id
        try:
            if name in self._streams:
                raise UsageError(f"request {name!r} is running already")
            stream = self._intake.take(command, perf_counter())
        except Exception as error:  # a tokenizer or a template raises what it likes
            failure = _failure("the prompt", error)
            self._events.append(Failed(name, failure))
            self.log.add(RequestEnded(name, "error", None, str(failure)))
        else:
            self._streams[name] = stream
            self._scheduler.add(stream.request)
            tokens = len(stream.request.prompt)
            self.log.add(RequestQueued(name, tokens, command.priority, stream.request.adapter))

    def abort(self, request_id: str) -> None:
        """End a request, whatever its state; unknown ids are over already.

        Its blocks are free at once, or when the step in flight that touches them has landed.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            try:
                tail = stream.flush()
                if tail.text or tail.thinking:
                    self._events.append(Delta(request_id, tail.text, (), tail.thinking))
                self._finish(stream, "abort")
            except Exception as error:
                self._fail(stream.request, _failure("the output", error))

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._events or self._launched)

    def step(self) -> list[Event]:
        """Schedule, submit one forward, land one; returns what happened since the last step."""
        work = Work(perf_counter())
        self._propose()
        plan = self._scheduler.schedule(quiet=not self._launched)
        for request, error in self._scheduler.take_rejected():
            self._fail(request, error)
        changes = self._scheduler.take_changes()
        self._forget_preempted(changes)
        self.log.add(*changes)
        work.schedule_s = perf_counter() - work.started
        launched = bool(plan) and self._launch(plan, work)
        self._land_all_but(1 if launched and self._may_run_ahead() else 0, work)
        if plan or work.landed or self._events:  # what was aborted or refused has changed numbers, too
            self._report(changes, work)
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self._land_all_but(0, Work(perf_counter()))
        self.log.close()
        if self.speculation:
            self.speculation.close()
        self.executor.shutdown()

    # A step

    def _may_run_ahead(self) -> bool:
        if not self._one_step_ahead or any(request.needs_output for request in self._scheduler.running):
            return False
        return self.speculation is None or not self.speculation.wants(self._scheduler.decoding())

    def _propose(self) -> None:
        if self.speculation and not self._launched:
            self.speculation.propose(self._scheduler.decoding(), self._scheduler.draft_budget)

    def _forget_preempted(self, changes: Sequence[Change]) -> None:
        """What a proposer holds for a request that waits, others may need."""
        preempted = [change.request_id for change in changes if isinstance(change, RequestPreempted)]
        for stream in filter(None, map(self._streams.get, preempted)):  # it may have ended since
            if self.speculation:
                self.speculation.forget(stream.request)

    def _launch(self, plan: list[Scheduled], work: Work) -> bool:
        """Submit a step; False if it cannot be: whoever is to blame has failed, or made room."""
        now = perf_counter()
        for scheduled in plan:
            self._streams[scheduled.request.request_id].timer.scheduled(now)
        try:
            items = [item_of(scheduled) for scheduled in plan]
            submission = self.executor.submit(UnifiedBatch(tuple(items)))
            if isinstance(submission, Deferred):
                if not self._launched and not self._scheduler.relieve():
                    self._fail(plan[-1].request, CapacityError(submission.shortfall, 0))
            elif isinstance(submission, NotSubmitted):
                blamed = [s.request for s in plan if s.request.cache_id in submission.cache_ids]
                self._fail_each(blamed or self._scheduler.running, submission.error)
            else:
                self._launched.append(Launched(plan, items, submission, now))
                return True
        except Exception as error:
            self._lose_all(error)
        finally:
            work.forward_s += perf_counter() - now
        return False

    def _land_all_but(self, count: int, work: Work) -> None:
        while len(self._launched) > count:
            launched = self._launched.popleft()
            started = perf_counter()
            try:
                results = launched.result()
            except Exception as error:
                self._lose_all(error)
                return
            landed = perf_counter()
            work.forward_s += landed - started
            work.landed += 1
            self._steps += 1
            self._commit_all(launched, results, work)
            if self.speculation:
                begun = max(launched.started, self._landed)  # the device takes one step after the other
                self.speculation.stepped(launched.num_rows, launched.num_drafts, landed - begun)
            self._landed = landed

    def _lose_all(self, error: Exception) -> None:
        """The device's state is unknown: what runs is lost, the engine is not."""
        while self._launched:
            with suppress(Exception):
                self._launched.popleft().result()
        self._fail_each(self._scheduler.running, _failure("the forward", error))

    def _commit_all(self, launched: Launched, results: list[ItemResult], work: Work) -> None:
        now = perf_counter()
        for scheduled, item, result in zip(launched.plan, launched.items, results, strict=True):
            request = scheduled.request
            if request.state is RequestState.FINISHED:  # while this step of it was in flight
                continue
            computed = launched.settle(request, item, result)
            try:
                count = self._commit(request, item.pos_offset, result, now)
            except Exception as error:  # this request's text; its neighbours go on
                self._fail(request, _failure("the output", error))
            else:
                work.count(scheduled, computed, count)

    def _commit(self, request: Request, start: int, result: ItemResult, now: float) -> int:
        """Take in what a request's rows have said; returns how many output tokens that was."""
        stream = self._streams[request.request_id]
        if result.prompt_logprobs:
            stream.take_prompt_logprobs(start + 1, result.prompt_logprobs)
        if not result.token_ids:
            return 0
        tokens = accepted(request.drafts, result.token_ids)
        new, count = stream.add_all(tokens, now)
        if request.drafts:
            self._verified(request, start + count, len(tokens) - 1)
        name = request.request_id
        self._events.append(Delta(name, new.text, tokens[:count], new.thinking, result.logprobs[:count]))
        if self.log and len(request.output) == count:
            self.log.add(FirstToken(name, stream.timer.ttft_s))
        if new.finish_reason:
            self._finish(stream, new.finish_reason)
        return count

    def _verified(self, request: Request, length: int, num_accepted: int) -> None:
        """Keep `length` tokens of a request whose drafts are verified."""
        assert request.cache_id is not None
        assert self.speculation is not None
        self.executor.truncate_kv(request.cache_id, length)
        request.num_computed_tokens = length
        request.num_drafted += len(request.drafts)
        request.num_accepted += num_accepted
        request.num_verifies += 1
        self.speculation.verified(request, len(request.drafts), num_accepted)
        request.drafts = []

    # Ends of requests

    def _finish(self, stream: OutputStream, reason: str) -> None:
        request = stream.request
        del self._streams[request.request_id]
        self._scheduler.finish(request, completed=reason != "abort")
        if self.speculation:
            self.speculation.forget(request)
        stats = stream.stats(reason, perf_counter())
        self._events.append(Finished(request.request_id, stats, tuple(stream.prompt_logprobs)))
        self.log.add(RequestEnded(request.request_id, reason, stats))

    def _fail(self, request: Request, error: FerrumError) -> None:
        stream = self._streams.pop(request.request_id)
        self._scheduler.finish(request, completed=False)
        if self.speculation:
            self.speculation.forget(request)
        self._events.append(Failed(request.request_id, error))
        stats = stream.stats("error", perf_counter())
        self.log.add(RequestEnded(request.request_id, "error", stats, str(error)))

    def _fail_each(self, requests: Iterable[Request], error: FerrumError) -> None:
        for request in list(requests):
            self._fail(request, error)

    def _report(self, changes: Sequence[Change], work: Work) -> None:
        admitted = [change for change in changes if isinstance(change, RequestAdmitted)]
        seconds = perf_counter() - work.started
        stats = StepStats(
            step=self._steps,
            seconds=seconds,
            schedule_s=work.schedule_s,
            forward_s=work.forward_s,
            commit_s=seconds - work.schedule_s - work.forward_s,
            prefill_tokens=work.prefill_tokens,
            decode_tokens=work.decode_tokens,
            admitted_tokens=sum(change.tokens for change in admitted),
            cached_tokens=sum(change.cached_tokens for change in admitted),
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            preempted=self._scheduler.num_preempted,
            preemptions=self._scheduler.preemptions,
            kv=self.executor.kv_capacity_snapshot(),
            cache=self.executor.cache_metrics(),
            lora=self.executor.lora_metrics(),
            speculation=self.speculation.stats() if self.speculation else None,
        )
        self._events.append(Stepped(stats))
        self.log.add(StepDone(stats))
        notes = self.log.take_notes() + (self.speculation.take_notes() if self.speculation else [])
        self._events += map(Notice, notes)


def _failure(what: str, error: Exception) -> FerrumError:
    if isinstance(error, FerrumError):
        return error
    return FerrumError(f"{what} failed: {one_line(error)}", next_step="send the request again")
