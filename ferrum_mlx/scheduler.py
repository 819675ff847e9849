"""Who gets how many tokens this step.

There are no phases: a request is given as many of the tokens it has not computed, drafts included, as
the budget allows. Those that decode come first, then the others, then waiting ones while the pool
admits them; among equals a lower priority number goes first, then the earlier arrival.

When the pool is short, prefills wait; when decodes alone do not fit, one request is preempted: it keeps
its tokens and computes them again later. The victim is of the lowest priority, and of those the
cheapest to compute again. So the request that has come furthest always gets on, and everyone after it.
A preempted request comes back when another one has ended, since until then running ones only grow.
Drafts never cost anyone a block: they are added last, where there is room for all of them.

While a step is in flight nobody is preempted or found impossible: the plan is then empty, and the next
one is made when the step is done.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

from ferrum_mlx.capacity import Admission, Admitted, CacheCompletion, Deferred, KvSlotRequest, Rejected
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, ContextLengthError
from ferrum_mlx.events import RequestAdmitted, RequestPreempted, RequestResumed
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.request import Request, RequestState

Change = RequestAdmitted | RequestResumed | RequestPreempted


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`decodes`: the tokens are the request's last one, and its drafts."""

    request: Request
    num_tokens: int
    decodes: bool = False


class _InFlightError(Exception):
    """What has to be done needs a quiet executor."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in a queue, and why it is not admitted yet.

    Attributes:
        order: priority, then arrival.
        deferred, version: the last answer to a probe, and the capacity version it was given at.
        ends_seen: how many running requests had ended when this one was preempted.
    """

    request: Request
    order: tuple[int, int]
    deferred: Deferred | None = None
    version: int = -1
    ends_seen: int = -1


class Scheduler:
    def __init__(self, executor: ModelExecutor, config: EngineConfig) -> None:
        self._executor = executor
        self._budget = min(config.max_num_batched_tokens, executor.maximum_scheduled_tokens)
        self._max_chunk = config.max_prefill_chunk
        self._while_decoding = config.prefill_while_decoding or executor.capabilities().prefill_while_decoding
        self._max_seqs = min(config.max_num_seqs, executor.maximum_active_sequences, self._budget)
        self.preemptions = 0
        self._quiet = True
        self._waiting: list[_Entry] = []  # by order, both
        self._running: list[_Entry] = []
        self._entries: dict[Request, _Entry] = {}
        self._arrivals = self._ends = 0
        self._rejected: list[tuple[Request, ContextLengthError]] = []
        self._changes: list[Change] = []

    @property
    def running(self) -> list[Request]:
        return [entry.request for entry in self._running]

    def requests(self) -> list[Request]:
        """All that have not ended, in the order of their turn, running ones first."""
        return [entry.request for entry in (*self._running, *self._waiting)]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """How many of the waiting ones ran before."""
        return sum(entry.request.state is RequestState.PREEMPTED for entry in self._waiting)

    def add(self, request: Request) -> None:
        self._arrivals += 1
        entry = self._entries[request] = _Entry(request, (request.priority, self._arrivals))
        insort(self._waiting, entry, key=_order)

    def has_work(self) -> bool:
        return bool(self._entries)

    def decoding(self) -> list[Request]:
        """Running requests whose next step is a decode, in the order of their turn."""
        return [request for request in self.running if request.is_decoding]

    @property
    def draft_budget(self) -> int:
        """Drafts that a step may verify in all: half of what its decodes leave, so prefills get on."""
        return max(0, self._budget - len(self.decoding())) // 2

    def schedule(self, *, quiet: bool = True) -> list[Scheduled]:
        """Fill one step; every scheduled token has a writable KV slot when this returns.

        Args:
            quiet: no step is in flight.
        """
        self._quiet = quiet
        try:
            self._make_way()
            plan = self._schedule_running()
            self._schedule_waiting(plan)
        except _InFlightError:
            return []
        finally:
            self._quiet = True
        return self._with_drafts(plan)

    def finish(self, request: Request, *, completed: bool) -> None:
        """Take a request out, whatever its state; frees its blocks."""
        self._dequeue(self._entries.pop(request))
        if request.cache_id is None:
            self._executor.cancel_prefill_admission(request.request_id)
        elif completed:
            counts = len(request.prompt), len(request.output)
            self._executor.complete_cache(CacheCompletion(request.request_id, request.cache_id, *counts))
        else:
            self._executor.release_cache(request.cache_id)
        self._ends += request.cache_id is not None
        request.cache_id, request.state = None, RequestState.FINISHED

    def relieve(self) -> bool:
        """Make room for a step that does not fit; False when nobody could give way."""
        useful = self._useful(self._running)
        if len(self._running) < 2 or not useful:
            return False
        self._preempt(useful)
        return True

    def take_rejected(self) -> list[tuple[Request, ContextLengthError]]:
        """Requests found impossible since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def take_changes(self) -> list[Change]:
        """Admissions and preemptions since the last call."""
        changes, self._changes = self._changes, []
        return changes

    # Running requests

    def _schedule_running(self) -> list[Scheduled]:
        while plan := self._fill():
            if self._reserve(plan):
                return plan
            self._check_quiet()
            if not self.relieve():
                self._reject(self._running[0], "the KV pool cannot hold it, though it runs alone")
        return []

    def _reserve(self, plan: list[Scheduled]) -> bool:
        """Reserve for all that fits, taking out prefills from the last on; False: not even the decodes do."""
        while plan:
            try:
                self._executor.reserve_kv_slots([_slots(s.request, s.num_tokens) for s in plan])
            except CapacityError:
                if plan[-1].decodes:
                    return False
                plan.pop()
            else:
                return True
        return False

    def _fill(self) -> list[Scheduled]:
        """Decodes first, then prefills, within the budgets; `_with_drafts` adds what is kept for drafts."""
        budget, plan, others = self._budget, [], []
        for entry in self._running:
            request = entry.request
            if not request.is_decoding:
                others.append(request)
            elif not request.is_at_end:
                plan.append(Scheduled(request, 1, decodes=True))
                budget -= 1 + len(request.drafts)
        budget = max(0, min(budget, self._while_decoding)) if plan else budget
        for request in others:
            if count := self._share(request, budget):
                plan.append(Scheduled(request, count))
                budget -= count
        return plan

    def _with_drafts(self, plan: list[Scheduled]) -> list[Scheduled]:
        """Drafts take what all the others leave, and are dropped if that is too little."""
        if not any(s.request.drafts for s in plan):
            return plan
        drafted = [replace(s, num_tokens=s.num_tokens + len(s.request.drafts)) for s in plan]
        try:
            if sum(s.num_tokens for s in drafted) <= self._budget:  # a resumed request may have joined
                self._executor.reserve_kv_slots([_slots(s.request, s.num_tokens) for s in drafted])
                return drafted
        except CapacityError:
            pass
        for scheduled in plan:
            scheduled.request.drafts = []
        return plan

    def _share(self, request: Request, budget: int) -> int:
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, self._max_chunk, budget)
        if request.split_at is not None and start < request.split_at < start + count:
            return request.split_at - start
        return count

    def _preempt(self, candidates: list[_Entry]) -> None:
        """Evict one of them."""
        self._check_quiet()
        entry = min(candidates, key=lambda e: (-e.order[0], e.request.num_computed_tokens, -e.order[1]))
        request = entry.request
        assert request.cache_id is not None
        self._executor.preempt(request.request_id, request.cache_id)
        self._running.remove(entry)
        self._changes.append(RequestPreempted(request.request_id, request.num_computed_tokens))
        request.lost_tokens = max(request.lost_tokens, request.num_computed_tokens)
        request.cache_id, request.num_computed_tokens, request.split_at = None, 0, None
        request.drafts = []
        request.state = RequestState.PREEMPTED
        request.preemptions += 1
        self.preemptions += 1
        entry.ends_seen, entry.deferred = self._ends, None
        insort(self._waiting, entry, key=_order)

    def _useful(self, entries: list[_Entry]) -> list[_Entry]:
        """Those whose blocks are not all shared, so that evicting them frees some."""
        return [entry for entry in entries if self._releasable(entry)]

    def _releasable(self, entry: _Entry) -> int:
        assert entry.request.cache_id is not None
        return self._executor.releasable_blocks(entry.request.cache_id)

    # Waiting requests

    def _schedule_waiting(self, plan: list[Scheduled]) -> None:
        decoding = sum(1 + len(s.request.drafts) for s in plan if s.decodes)
        prefill = sum(s.num_tokens for s in plan if not s.decodes)
        budget = self._budget - decoding
        budget = (min(budget, self._while_decoding) if decoding else budget) - prefill
        for entry in self._waiting.copy():
            if budget <= 0 or len(self._running) >= self._max_seqs or self._must_wait(entry):
                return
            admission = self._probe(entry)
            if isinstance(admission, Deferred):
                if self._running and admission.shortfall == 0:
                    continue  # another request is computing its prefix
                if self._running or not self._quiet:
                    return  # nobody overtakes a request that waits for blocks
                admission = Rejected(f"{admission.shortfall} KV blocks are missing though nothing runs")
            if isinstance(admission, Rejected):
                self._reject(entry, admission.reason)
                continue
            self._run(entry, admission)
            request = entry.request
            count = self._share(request, budget)
            self._executor.reserve_kv_slots([_slots(request, count)])  # admission promised them
            plan.append(Scheduled(request, count))
            budget -= count

    def _must_wait(self, entry: _Entry) -> bool:
        """A preempted request comes back when another has ended: until then running ones only grow."""
        return bool(self._running) and entry.ends_seen == self._ends

    def _probe(self, entry: _Entry) -> Admission:
        """Ask for admission, unless nothing has been released since the last time."""
        version = self._executor.capacity.value
        if entry.deferred is not None and entry.version == version and self._running:
            return entry.deferred
        request = entry.request
        admission = self._executor.try_admit_prefill(
            request.request_id,
            request.tokens(0, request.num_tokens),
            use_prefix=request.params.prompt_logprobs is None,
            adapter=request.adapter,
        )
        entry.deferred = admission if isinstance(admission, Deferred) else None
        entry.version = version
        return admission

    def _run(self, entry: _Entry, admission: Admitted) -> None:
        request, cached = entry.request, admission.num_cached_tokens
        counts = request.request_id, request.num_tokens, cached
        if request.state is RequestState.WAITING:
            request.num_cached_tokens = cached
            self._changes.append(RequestAdmitted(*counts))
        else:
            self._changes.append(RequestResumed(*counts))
        request.cache_id, request.split_at = admission.cache_id, admission.split_at
        request.num_computed_tokens = cached
        request.state = RequestState.RUNNING
        self._waiting.remove(entry)
        insort(self._running, entry, key=_order)

    def _make_way(self) -> None:
        """Let the first waiting request take the place of running ones of lower priority."""
        while self._waiting and self._running and self._running[-1].order[0] > self._waiting[0].order[0]:
            first = self._waiting[0]
            lower = [e for e in self._running if e.order[0] > first.order[0]]
            if first.request.is_recomputing:  # one replay never makes another one necessary
                lower = [e for e in lower if not e.request.is_recomputing]
            full = len(self._running) >= self._max_seqs
            if full and not lower:
                return
            if full:  # before an admission that would come to nothing
                self._check_quiet()
            admission = self._probe(first)
            if isinstance(admission, Rejected):
                self._reject(first, admission.reason)
            elif isinstance(admission, Admitted):
                if full:
                    self._preempt(lower)
                self._run(first, admission)
            elif admission.shortfall > sum(map(self._releasable, lower)) or not (admission.shortfall or full):
                return  # it would not help, or its prefix is on its way
            else:
                self._preempt(self._useful(lower) if admission.shortfall else lower)

    # Both

    def _check_quiet(self) -> None:
        if not self._quiet:
            raise _InFlightError

    def _dequeue(self, entry: _Entry) -> None:
        for queue in (self._waiting, self._running):
            if entry in queue:
                queue.remove(entry)

    def _reject(self, entry: _Entry, reason: str) -> None:
        self._dequeue(entry)
        self._rejected.append((entry.request, ContextLengthError(reason)))


def _order(entry: _Entry) -> tuple[int, int]:
    return entry.order


def _slots(request: Request, count: int) -> KvSlotRequest:
    assert request.cache_id is not None
    return KvSlotRequest(request.cache_id, request.num_computed_tokens + count)
