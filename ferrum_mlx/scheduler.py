"""Who gets how many tokens this step.

There are no phases: a request is given as many of the tokens it has not computed as the budget
allows. Those that lack one token (they decode) come first, then the others in order of arrival, then
waiting ones while the pool admits them. When the pool is short the latest arrival is preempted: it
keeps its tokens and computes them again later. The oldest request is never a victim, so it always
gets on, and so does everyone after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ferrum_mlx.capacity import Admitted, CacheCompletion, Deferred, KvSlotRequest, Rejected
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, ContextLengthError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class Scheduled:
    request: Request
    num_tokens: int


class Scheduler:
    def __init__(self, executor: ModelExecutor, config: EngineConfig) -> None:
        self._executor = executor
        self._budget = min(config.max_num_batched_tokens, executor.maximum_scheduled_tokens)
        self._max_chunk = config.max_prefill_chunk
        self._max_seqs = min(config.max_num_seqs, executor.maximum_active_sequences, self._budget)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.preemptions = 0
        self._rejected: list[tuple[Request, ContextLengthError]] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """Fill one step; every scheduled token has a writable KV slot when this returns."""
        preemptions = self.preemptions
        plan = self._schedule_running()
        if self.preemptions == preemptions:
            budget = self._budget - sum(scheduled.num_tokens for scheduled in plan)
            plan += self._schedule_waiting(budget)
        return plan

    def finish(self, request: Request, *, completed: bool) -> None:
        """Take a request out, whatever its state; frees its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.cache_id is not None:
            if completed:
                usage = len(request.prompt), len(request.output)
                self._executor.complete_cache(CacheCompletion(request.request_id, request.cache_id, *usage))
            else:
                self._executor.release_cache(request.cache_id)
        request.cache_id, request.state = None, RequestState.FINISHED

    def take_rejected(self) -> list[tuple[Request, ContextLengthError]]:
        """Requests found impossible since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _schedule_running(self) -> list[Scheduled]:
        while True:
            budget = self._budget
            plan = []
            for request in sorted(self.running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
                if count := self._share(request, budget):
                    plan.append(Scheduled(request, count))
                    budget -= count
            try:
                self._executor.reserve_kv_slots([_slots(s.request, s.num_tokens) for s in plan])
            except CapacityError:
                self._preempt(self.running[-1])
            else:
                return plan

    def _schedule_waiting(self, budget: int) -> list[Scheduled]:
        plan = []
        while budget and self.waiting and len(self.running) < self._max_seqs:
            request = self.waiting[0]
            if not self._admit(request):
                break
            if request.state is RequestState.RUNNING:
                count = self._share(request, budget)
                self._executor.reserve_kv_slots([_slots(request, count)])  # admission promised them
                plan.append(Scheduled(request, count))
                budget -= count
        return plan

    def _share(self, request: Request, budget: int) -> int:
        return min(request.num_tokens - request.num_computed_tokens, self._max_chunk, budget)

    def _admit(self, request: Request) -> bool:
        """Move the first waiting request to running, or out if it can never run; False: not now."""
        admission = self._executor.try_admit_prefill(
            request.request_id, request.tokens(0, request.num_tokens)
        )
        if isinstance(admission, Deferred):
            if self.running:
                return False
            admission = Rejected(f"{admission.shortfall} KV blocks are missing though nothing runs")
        self.waiting.popleft()
        if isinstance(admission, Rejected):
            request.state = RequestState.FINISHED
            self._rejected.append((request, ContextLengthError(admission.reason)))
            return True
        self._run(request, admission)
        return True

    def _run(self, request: Request, admission: Admitted) -> None:
        if request.state is RequestState.WAITING:
            request.num_cached_tokens = admission.num_cached_tokens
        request.cache_id = admission.cache_id
        request.num_computed_tokens = admission.num_cached_tokens
        request.state = RequestState.RUNNING
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        assert request.cache_id is not None
        self._executor.release_cache(request.cache_id)
        self.running.remove(request)
        request.cache_id, request.num_computed_tokens = None, 0
        request.state = RequestState.PREEMPTED
        self.waiting.appendleft(request)
        self.preemptions += 1


def _slots(request: Request, count: int) -> KvSlotRequest:
    assert request.cache_id is not None
    return KvSlotRequest(request.cache_id, request.num_computed_tokens + count)
