"""The loop that joins scheduler and executor: submit, step, abort. One thread owns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError, one_line
from ferrum_mlx.events import EventLog, FirstToken, RequestAdmitted, RequestEnded, RequestQueued, StepDone
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.intake import Intake
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Notice, Ready, Stepped, Submit
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.output import OutputStream, TextCodec
from ferrum_mlx.request import Request
from ferrum_mlx.scheduler import Change, Scheduled, Scheduler


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
    ) -> None:
        self.executor = executor
        self.log = log or EventLog()
        self._intake = Intake(codec, executor.info.vocab_size, executor.capabilities().kv_capacity)
        self._scheduler = Scheduler(executor, config)
        self._backend, self._backend_reason, self._notes = backend, backend_reason, tuple(notes)
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
        )

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
            self.log.add(RequestQueued(name, len(stream.request.prompt), command.priority))

    def abort(self, request_id: str) -> None:
        """End a request, whatever its state; its blocks are free at once. Unknown ids are over already."""
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
        return self._scheduler.has_work() or bool(self._events)

    def step(self) -> list[Event]:
        """Schedule, run one forward, commit; returns what happened since the last step."""
        started = perf_counter()
        plan = self._scheduler.schedule()
        for request, error in self._scheduler.take_rejected():
            self._fail(request, error)
        changes = self._scheduler.take_changes()
        self.log.add(*changes)
        scheduled = perf_counter()
        results = self._forward(plan, scheduled) if plan else []
        forwarded = perf_counter()
        stats = self._commit_all(plan, results, forwarded)
        if plan or self._events:  # also without a forward: what was aborted or refused has changed numbers
            self._report(changes, stats, (started, scheduled, forwarded))
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self.log.close()
        self.executor.shutdown()

    def _forward(self, plan: list[Scheduled], now: float) -> list[ItemResult]:
        """Empty if nothing came of it; then whoever is to blame has failed, or made room."""
        for scheduled in plan:
            self._streams[scheduled.request.request_id].timer.scheduled(now)
        try:
            submission = self.executor.submit(UnifiedBatch(tuple([_item(s) for s in plan])))
            if isinstance(submission, Deferred):
                if not self._scheduler.relieve():
                    self._fail(plan[-1].request, CapacityError(submission.shortfall, 0))
            elif isinstance(submission, NotSubmitted):
                blamed = [s.request for s in plan if s.request.cache_id in submission.cache_ids]
                self._fail_each(blamed or self._scheduler.running, submission.error)
            else:
                return submission.result()
        except Exception as error:  # the device's state is unknown: what runs is lost, the engine is not
            self._fail_each(self._scheduler.running, _failure("the forward", error))
        return []

    def _commit_all(self, plan: list[Scheduled], results: list[ItemResult], now: float) -> dict[str, int]:
        """Take the results in; returns the counts of the step."""
        decodes = prefill = 0
        for scheduled, result in zip(plan, results, strict=False):  # no results of a step that failed
            request = scheduled.request
            if request.is_decoding:
                decodes += 1
            else:
                prefill += _computed(scheduled, result)
            try:
                self._commit(scheduled, result, now)
            except Exception as error:  # this request's text; its neighbours go on
                self._fail(request, _failure("the output", error))
        self._steps += bool(results)
        return {"decode_tokens": decodes, "prefill_tokens": prefill}

    def _commit(self, scheduled: Scheduled, result: ItemResult, now: float) -> None:
        request = scheduled.request
        stream = self._streams[request.request_id]
        if result.prompt_logprobs:
            stream.take_prompt_logprobs(request.num_computed_tokens + 1, result.prompt_logprobs)
        request.advance(_computed(scheduled, result))
        if not result.token_ids:
            return
        new = stream.add(result.token_ids[0], now)
        name = request.request_id
        self._events.append(Delta(name, new.text, result.token_ids, new.thinking, result.logprobs))
        if self.log and len(request.output) == 1:
            self.log.add(FirstToken(name, stream.timer.ttft_s))
        if new.finish_reason:
            self._finish(stream, new.finish_reason)

    # Ends of requests

    def _finish(self, stream: OutputStream, reason: str) -> None:
        request = stream.request
        del self._streams[request.request_id]
        self._scheduler.finish(request, completed=reason != "abort")
        stats = stream.stats(reason, perf_counter())
        self._events.append(Finished(request.request_id, stats, tuple(stream.prompt_logprobs)))
        self.log.add(RequestEnded(request.request_id, reason, stats))

    def _fail(self, request: Request, error: FerrumError) -> None:
        stream = self._streams.pop(request.request_id)
        self._scheduler.finish(request, completed=False)
        self._events.append(Failed(request.request_id, error))
        stats = stream.stats("error", perf_counter())
        self.log.add(RequestEnded(request.request_id, "error", stats, str(error)))

    def _fail_each(self, requests: Iterable[Request], error: FerrumError) -> None:
        for request in list(requests):
            self._fail(request, error)

    def _report(
        self, changes: Sequence[Change], counts: dict[str, int], times: tuple[float, float, float]
    ) -> None:
        started, scheduled, forwarded = times
        admitted = [change for change in changes if isinstance(change, RequestAdmitted)]
        now = perf_counter()
        stats = StepStats(
            step=self._steps,
            seconds=now - started,
            schedule_s=scheduled - started,
            forward_s=forwarded - scheduled,
            commit_s=now - forwarded,
            admitted_tokens=sum(change.tokens for change in admitted),
            cached_tokens=sum(change.cached_tokens for change in admitted),
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            preempted=self._scheduler.num_preempted,
            preemptions=self._scheduler.preemptions,
            kv=self.executor.kv_capacity_snapshot(),
            cache=self.executor.cache_metrics(),
            **counts,
        )
        self._events.append(Stepped(stats))
        self.log.add(StepDone(stats))
        self._events += [Notice(note) for note in self.log.take_notes()]


def _computed(scheduled: Scheduled, result: ItemResult) -> int:
    return scheduled.num_tokens if result.num_tokens is None else result.num_tokens


def _failure(what: str, error: Exception) -> FerrumError:
    if isinstance(error, FerrumError):
        return error
    return FerrumError(f"{what} failed: {one_line(error)}", next_step="send the request again")


def _item(scheduled: Scheduled) -> UnifiedItem:
    request, params = scheduled.request, scheduled.request.params
    assert request.cache_id is not None
    start, end = request.num_computed_tokens, request.num_computed_tokens + scheduled.num_tokens
    targets = request.prompt[start + 1 : end + 1] if params.prompt_logprobs is not None else ()
    history = (request.prompt, request.output) if params.looks_back else ((), ())
    return UnifiedItem(
        cache_id=request.cache_id,
        q_tokens=request.tokens(start, end),
        pos_offset=start,
        is_final_chunk=end == request.num_tokens,
        sampling=RowSampling(
            params=params,
            seed=request.seed,
            sample_index=request.sample_index,
            position=len(request.output),
            prompt=history[0],
            output=history[1],
            end_ids=request.end_ids,
            bad_sequences=request.bad_sequences,
        ),
        logits=LogitsPolicy.PROMPT_LOGPROBS if targets else LogitsPolicy.SAMPLED,
        targets=tuple(targets),
    )
