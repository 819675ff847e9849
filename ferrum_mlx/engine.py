"""The loop that joins scheduler and executor: submit, step, abort. One thread owns it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from time import perf_counter

from ferrum_mlx.batch import ItemResult, RowSampling, UnifiedBatch, UnifiedItem
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ContextLengthError, FerrumError, UsageError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Prompt, Ready, Stepped, Submit
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.output import OutputStream, TextCodec
from ferrum_mlx.request import Request
from ferrum_mlx.scheduler import Scheduled, Scheduler


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
    ) -> None:
        self.executor = executor
        self._codec = codec
        self._scheduler = Scheduler(executor, config)
        self._backend, self._backend_reason, self._notes = backend, backend_reason, tuple(notes)
        self._streams: dict[str, OutputStream] = {}
        self._events: list[Event] = []  # raised outside of a step, delivered by the next one
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
        arrived = perf_counter()
        try:
            if command.request_id in self._streams:
                raise UsageError(f"request {command.request_id!r} is running already")
            request = self._request(command)
            stream = OutputStream(request, self._codec, arrived)
        except Exception as error:  # a tokenizer or a template raises what it likes
            self._events.append(Failed(command.request_id, _failure("the prompt", error)))
        else:
            self._streams[command.request_id] = stream
            self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request, whatever its state; its blocks are free at once. Unknown ids are over already."""
        stream = self._streams.get(request_id)
        if stream is not None:
            try:
                if tail := stream.flush():
                    self._events.append(Delta(request_id, tail, ()))
                self._events.append(self._finish(stream, "abort"))
            except Exception as error:
                self._events.append(self._fail(stream.request, _failure("the output", error)))

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._events)

    def step(self) -> list[Event]:
        """Schedule, run one forward, commit; returns what happened since the last step."""
        events, self._events = self._events, []
        started = perf_counter()
        plan = self._scheduler.schedule()
        for request, error in self._scheduler.take_rejected():
            events.append(self._fail(request, error))
        if not plan:  # a Stepped all the same: what was aborted or refused has changed the numbers
            return [*events, Stepped(self._stats([], 0, perf_counter() - started))] if events else events
        for scheduled in plan:
            self._streams[scheduled.request.request_id].scheduled(started)
        try:
            results = self.executor.unified_decode(UnifiedBatch(tuple(_item(s) for s in plan)))
        except Exception as error:  # the device's state is unknown: what runs is lost, the engine is not
            return events + self._fail_running(error)
        now = perf_counter()
        decodes = sum(s.num_tokens == 1 and bool(s.request.output) for s in plan)
        for scheduled, result in zip(plan, results, strict=True):
            try:
                events += self._commit(scheduled, result, now)
            except Exception as error:  # this request's text; its neighbours go on
                events.append(self._fail(scheduled.request, _failure("the output", error)))
        self._steps += 1
        events.append(Stepped(self._stats(plan, decodes, now - started)))
        return events

    def shutdown(self) -> None:
        self.executor.shutdown()

    def _request(self, command: Submit) -> Request:
        prompt = self._encode(command.prompt)
        params = command.params
        room = self.executor.capabilities().kv_capacity - len(prompt)
        if not prompt or room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens",
                f"allowed: 1 to {room + len(prompt) - 1} at this context",
                "shorten it, or raise --max-model-len or --kv-memory" if prompt else "type something",
            )
        return Request(
            request_id=command.request_id,
            prompt=prompt,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=min(params.max_tokens or room, room),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._codec.encode(prompt)
        if all(isinstance(part, dict) for part in prompt):
            return self._codec.encode_chat([part for part in prompt if isinstance(part, dict)])
        vocab = self.executor.info.vocab_size
        ids = [part for part in prompt if isinstance(part, int)]
        if len(ids) < len(prompt) or not all(0 <= token < vocab for token in ids):
            raise UsageError(
                "the prompt's token ids are not all ids", f"allowed: whole numbers from 0 to {vocab - 1}"
            )
        return ids

    def _commit(self, scheduled: Scheduled, result: ItemResult, now: float) -> list[Event]:
        request = scheduled.request
        request.num_computed_tokens += scheduled.num_tokens
        if not result.token_ids:
            return []
        stream = self._streams[request.request_id]
        text, reason = stream.add(result.token_ids[0], now)
        events: list[Event] = [Delta(request.request_id, text, result.token_ids)]
        if reason:
            events.append(self._finish(stream, reason))
        return events

    def _finish(self, stream: OutputStream, reason: str) -> Finished:
        request = stream.request
        del self._streams[request.request_id]
        self._scheduler.finish(request, completed=reason != "abort")
        return Finished(request.request_id, reason, stream.usage(), stream.timings())

    def _fail(self, request: Request, error: FerrumError) -> Failed:
        del self._streams[request.request_id]
        self._scheduler.finish(request, completed=False)
        return Failed(request.request_id, error)

    def _fail_running(self, error: Exception) -> list[Event]:
        failure = _failure("the forward", error)
        return [self._fail(request, failure) for request in list(self._scheduler.running)]

    def _stats(self, plan: Sequence[Scheduled], decodes: int, seconds: float) -> StepStats:
        return StepStats(
            step=self._steps,
            seconds=seconds,
            prefill_tokens=sum(s.num_tokens for s in plan) - decodes,
            decode_tokens=decodes,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            preemptions=self._scheduler.preemptions,
            kv=self.executor.kv_capacity_snapshot(),
        )


def _failure(what: str, error: Exception) -> FerrumError:
    if isinstance(error, FerrumError):
        return error
    said = " ".join(str(error).split())
    return FerrumError(f"{what} failed: {type(error).__name__}: {said}", next_step="send the request again")


def _item(scheduled: Scheduled) -> UnifiedItem:
    request = scheduled.request
    assert request.cache_id is not None
    start, end = request.num_computed_tokens, request.num_computed_tokens + scheduled.num_tokens
    params = request.params
    return UnifiedItem(
        cache_id=request.cache_id,
        q_tokens=request.tokens(start, end),
        pos_offset=start,
        is_final_chunk=end == request.num_tokens,
        sampling=RowSampling(
            params=params,
            seed=request.seed,
            position=len(request.output),
        ),
    )
