"""What every paged backend shares: the contract's bookkeeping over a KVManager.

A backend adds its storage arrays and `_launch`, the forward itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import final

from ferrum_mlx.batch import ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import (
    Admission,
    Admitted,
    CacheCompletion,
    CapacityVersion,
    Deferred,
    KvSlotRequest,
    KvSlotReservation,
    Rejected,
)
from ferrum_mlx.errors import ContextLengthError, ContractError
from ferrum_mlx.executor import ModelExecutor, Pending
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.metrics import CacheMetrics, KVMap, KVUsage
from ferrum_mlx.model_info import ExecutorState, ExecutorStatus, StateSpec


class PagedExecutor(ModelExecutor):
    def __init__(self, kv: KVManager, *, max_model_len: int, max_seqs: int, max_tokens: int) -> None:
        self.kv = kv
        self.max_model_len = max_model_len
        self._max_seqs, self._max_tokens = max_seqs, max_tokens
        self._admissions: dict[str, int] = {}  # request_id → cache that no forward has used yet
        self._state = ExecutorState.INITIALIZING
        self._forwards, self._forward_seconds = 0, 0.0
        self._in_flight = False

    # What a backend provides

    @abstractmethod
    def _launch(self, batch: UnifiedBatch) -> Pending:
        """Start the forward of a checked batch; its result() returns one ItemResult an item."""

    def _recover(self) -> None:
        """Make the storage usable again after a forward that failed; what it held is lost."""

    @abstractmethod
    def _memory_in_use(self) -> tuple[int, int]:
        """Bytes held now, and at the peak."""

    # Admission and KV

    @property
    def maximum_active_sequences(self) -> int:
        return self._max_seqs

    @property
    def maximum_scheduled_tokens(self) -> int:
        return self._max_tokens

    @property
    def capacity(self) -> CapacityVersion:
        return self.kv.capacity

    def recurrent_state_spec(self) -> tuple[StateSpec, ...] | None:
        return None

    def try_admit_prefill(
        self, request_id: str, prompt: Sequence[int], *, use_prefix: bool = True
    ) -> Admission:
        if len(self.kv) >= self._max_seqs:
            return Deferred(shortfall=0)
        if request_id in self._admissions:
            raise ContractError(f"request {request_id} is admitted already")
        ceiling = min(self.max_model_len, self.kv.max_tokens)
        if not 0 < len(prompt) <= ceiling:
            return Rejected(f"the prompt has {len(prompt)} tokens; allowed: 1 to {ceiling}")
        if shortfall := self.kv.shortfall(len(prompt)):
            return Deferred(shortfall)
        cache_id = self.kv.create(promised_len=len(prompt))
        self._admissions[request_id] = cache_id
        return Admitted(cache_id, num_cached_tokens=0)

    def cancel_prefill_admission(self, request_id: str) -> bool:
        cache_id = self._admissions.pop(request_id, None)
        if cache_id is None:
            return False
        self.kv.release(cache_id)
        return True

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        for request in requests:
            if request.target_len > self.max_model_len:
                raise ContextLengthError(
                    f"cache {request.cache_id} asks for {request.target_len} tokens",
                    f"allowed: at most {self.max_model_len}",
                )
        return self.kv.reserve(requests)

    def kv_capacity_snapshot(self) -> KVUsage:
        return self.kv.usage()

    def truncate_kv(self, cache_id: int, new_len: int) -> None:
        if self._in_flight:
            raise ContractError("a step is in flight", next_step="take its result first")
        self.kv.truncate(cache_id, new_len)

    def kv_map(self) -> KVMap:
        return self.kv.map()

    def cache_metrics(self) -> CacheMetrics:
        return self.kv.cache_metrics()

    def preempt(self, request_id: str, cache_id: int) -> None:
        self.release_cache(cache_id)

    def discard_prefill(self, cache_id: int) -> None:
        self.release_cache(cache_id)

    def releasable_blocks(self, cache_id: int) -> int:
        return self.kv.releasable(cache_id)

    def complete_cache(self, completion: CacheCompletion) -> None:
        if completion.cache_id not in self.kv:
            raise ContractError(f"there is no cache {completion.cache_id} to complete")
        self.release_cache(completion.cache_id)

    def release_cache(self, cache_id: int) -> None:
        self._forget_admissions({cache_id})
        self.kv.release(cache_id)

    # The forward

    @final
    def submit(self, batch: UnifiedBatch) -> Pending:
        self._check(batch)
        start = perf_counter()
        self._state = ExecutorState.BUSY
        try:
            pending = self._launch(batch)
        except BaseException:
            self._fail()
            raise
        self._in_flight = True
        return _InFlight(self, batch, pending, start)

    def _take(self, batch: UnifiedBatch, pending: Pending, start: float) -> list[ItemResult]:
        """Wait for a step, check that it answers the batch, and only then count its KV as computed."""
        self._in_flight = False
        try:
            results = pending.result()
            _check_results(batch, results)
        except BaseException:
            self._fail()
            raise
        for item in batch.items:
            self.kv.commit(item.cache_id, item.pos_offset + len(item.q_tokens))
        self._forget_admissions({item.cache_id for item in batch.items})
        self._state = ExecutorState.READY
        self._forwards += 1
        self._forward_seconds += perf_counter() - start
        return results

    def _fail(self) -> None:
        self._state = ExecutorState.ERROR
        self._recover()

    def status(self) -> ExecutorStatus:
        in_use, peak = self._memory_in_use()
        return ExecutorStatus(
            state=self._state,
            forwards=self._forwards,
            forward_seconds=self._forward_seconds,
            memory_bytes=in_use,
            peak_memory_bytes=peak,
            kv=self.kv.usage(),
        )

    def _forget_admissions(self, used: set[int]) -> None:
        self._admissions = {r: c for r, c in self._admissions.items() if c not in used}

    def _check(self, batch: UnifiedBatch) -> None:
        if self._in_flight:
            raise ContractError("a step is in flight", next_step="take its result first")
        if not batch.items:
            raise ContractError("the batch is empty")
        if batch.num_tokens > self._max_tokens:
            raise ContractError(f"the batch has {batch.num_tokens} tokens", f"allowed: {self._max_tokens}")
        if len({item.cache_id for item in batch.items}) != len(batch.items):
            raise ContractError("a cache stands twice in one batch")
        for item in batch.items:
            self._check_item(item)

    def _check_item(self, item: UnifiedItem) -> None:
        length = self.kv.length(item.cache_id)
        if not item.q_tokens:
            raise ContractError(f"the item of cache {item.cache_id} has no tokens")
        if item.pos_offset != length:
            raise ContractError(
                f"cache {item.cache_id} starts at {item.pos_offset}", f"allowed: {length}, its length"
            )
        vocab = self.info.vocab_size
        if not all(0 <= token < vocab for token in item.q_tokens):
            raise ContractError(
                f"cache {item.cache_id} has a token id out of range", f"allowed: 0 to {vocab - 1}"
            )
        if item.verify and not item.is_final_chunk:
            raise ContractError("a verify item cannot be an intermediate chunk")
        self.kv.check_reserved(item.cache_id, length + len(item.q_tokens))


def _check_results(batch: UnifiedBatch, results: list[ItemResult]) -> None:
    wanted = [(item.cache_id, item.num_sampled) for item in batch.items]
    got = [(result.cache_id, len(result.token_ids)) for result in results]
    if wanted != got:
        raise ContractError(f"the backend answered (cache, rows) {got}", f"allowed: {wanted}")


class _InFlight:
    """A submitted step; its result can be taken once."""

    def __init__(self, executor: PagedExecutor, batch: UnifiedBatch, pending: Pending, start: float) -> None:
        self._executor, self._batch, self._pending, self._start = executor, batch, pending, start

    def result(self) -> list[ItemResult]:
        return self._executor._take(self._batch, self._pending, self._start)
