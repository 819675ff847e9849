"""What every paged backend shares: the contract's bookkeeping over a KVManager.

A backend adds its storage arrays and `_launch`, the forward itself.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from operator import mul
from time import perf_counter
from typing import final

from ferrum_mlx.backends.flight import Flight, check_results
from ferrum_mlx.batch import IN_FLIGHT, ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import (
    Admission,
    Admitted,
    CacheCompletion,
    CapacityVersion,
    Deferred,
    KvSlotRequest,
    KvSlotReservation,
    NotSubmitted,
    Rejected,
)
from ferrum_mlx.errors import ContextLengthError, ContractError
from ferrum_mlx.executor import ModelExecutor, Submission
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.prefix import BlockKey
from ferrum_mlx.metrics import CacheMetrics, KVMap, KVUsage, LoraMetrics
from ferrum_mlx.model_info import ExecutorState, ExecutorStatus, StateSpec


class PagedExecutor(ModelExecutor):
    """`adapters` are the digests of the LoRA adapters by name."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_model_len: int,
        max_seqs: int,
        max_tokens: int,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.kv = kv
        self._digests = dict(adapters or {})
        self._adapters: dict[int, int] = {}  # cache_id → which adapter, from 1; those without are left out
        self.max_model_len = max_model_len
        self._max_seqs, self._max_tokens = max_seqs, max_tokens
        self._admissions: dict[str, int] = {}  # request_id → cache that no forward has used yet
        self._requests: dict[int, str] = {}  # cache_id → the request it was admitted for
        self._probed: dict[
            str, tuple[bytes, list[BlockKey]]
        ] = {}  # of deferred requests: root and tokens, keys
        self._state = ExecutorState.INITIALIZING
        self._forwards, self._forward_seconds = 0, 0.0
        self._flights: deque[Flight] = deque()  # in the order of their submission
        self._leaving: set[int] = set()  # released caches that a step in flight touches

    # What a backend provides

    @abstractmethod
    def _launch(self, batch: UnifiedBatch) -> Submission:
        """Start the forward of a checked batch; its result() returns one ItemResult an item.

        Where q_tokens is IN_FLIGHT, the id is the last one that the launch before this samples for the cache.
        Deferred and NotSubmitted are legal only while nothing has reached the device.
        """

    def _recover(self) -> None:
        """Make the storage usable again after a forward that failed; what it held is lost."""

    @abstractmethod
    def _memory_in_use(self) -> tuple[int, int]:
        """Bytes held now, and at the peak."""

    def _memory_limit(self) -> int:
        """Most bytes that the device gives without swapping; 0 where that is not known."""
        return 0

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
        self, request_id: str, prompt: Sequence[int], *, use_prefix: bool = True, adapter: str = ""
    ) -> Admission:
        salt = (adapter, self._digests[adapter]) if self.adapter_number(adapter) else ()
        if request_id in self._admissions:
            raise ContractError(f"request {request_id} is admitted already")
        ceiling = min(self.max_model_len, self.kv.max_tokens)
        if not 0 < len(prompt) <= ceiling:
            return Rejected(f"the prompt has {len(prompt)} tokens; allowed: 1 to {ceiling}")
        prefix = self.kv.prefix
        keys = self._keys(request_id, prompt, salt) if use_prefix else []
        hit = prefix.find(keys, len(prompt))
        if prefix.is_coming(keys, len(prompt), hit):
            return Deferred(shortfall=0)
        if shortfall := self.kv.shortfall(len(prompt), keys, hit):
            return Deferred(shortfall)
        if len(self.kv) >= self._max_seqs:
            return Deferred(shortfall=0)
        cache_id = self.kv.create(len(prompt), keys, hit, salt)
        self._probed.pop(request_id, None)
        self._admissions[request_id] = cache_id
        self._requests[cache_id] = request_id
        if adapter:
            self._adapters[cache_id] = self.adapter_number(adapter)
        return Admitted(cache_id, self.kv.num_cached(cache_id), self.kv.split_at(cache_id))

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self._digests)

    def adapter_number(self, name: str) -> int:
        """From 1, in the order they were loaded; 0 for "".

        Raises:
            ContractError: no adapter of that name is loaded.
        """
        if name and name not in self._digests:
            raise ContractError(f"there is no adapter {name!r}", f"allowed: {', '.join(self._digests)}")
        return list(self._digests).index(name) + 1 if name else 0

    def lora_metrics(self) -> LoraMetrics:
        active = dict.fromkeys(self._digests, 0)
        for number in self._adapters.values():
            active[self.adapter_names[number - 1]] += 1
        return LoraMetrics(bool(active), len(active), active)

    def _keys(self, request_id: str, prompt: Sequence[int], salt: Sequence[str]) -> list[BlockKey]:
        """The keys of a prompt, computed once however often a waiting request probes."""
        tokens = self.kv.prefix.root_of(salt) + array("i", prompt).tobytes()
        known = self._probed.get(request_id)
        if known is None or known[0] != tokens:
            known = self._probed[request_id] = tokens, self.kv.prefix.keys(prompt, salt)
        return known[1]

    def cancel_prefill_admission(self, request_id: str) -> bool:
        self._probed.pop(request_id, None)
        cache_id = self._admissions.pop(request_id, None)
        if cache_id is None:
            return False
        self._release(cache_id)
        return True

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        for request in requests:
            self._check_not_leaving(request.cache_id)
            if request.target_len > self.max_model_len:
                raise ContextLengthError(
                    f"cache {request.cache_id} asks for {request.target_len} tokens",
                    f"allowed: at most {self.max_model_len}",
                )
        return self.kv.reserve(requests)

    def kv_capacity_snapshot(self) -> KVUsage:
        return self.kv.usage()

    def truncate_kv(self, cache_id: int, new_len: int) -> None:
        self._check_quiet()
        self.kv.truncate(cache_id, new_len)

    def kv_map(self) -> KVMap:
        return self.kv.map()

    def cache_metrics(self) -> CacheMetrics:
        kv, prefix = self.kv, self.kv.prefix
        entries = [kv.num_keys(g) for g in range(len(kv.groups))]
        sizes = [group.bytes_per_token * kv.block_size for group in kv.groups]
        state_bytes = sum(spec.num_bytes for spec in self.recurrent_state_spec() or ())
        return CacheMetrics(
            enabled=prefix.enabled,
            block_size=kv.block_size,
            kv_dtype=self.info.kv_dtype or self.info.dtype,
            hits=prefix.hits,
            misses=prefix.misses,
            evictions=kv.evictions,
            saved_prefill_tokens=prefix.saved_tokens,
            entries=sum(entries) + kv.num_snapshots,
            bytes=sum(map(mul, entries, sizes)) + kv.num_snapshots * state_bytes,
        )

    def releasable_blocks(self, cache_id: int) -> int:
        return self.kv.releasable(cache_id)

    def complete_cache(self, completion: CacheCompletion) -> None:
        self._check_owner(completion.request_id, completion.cache_id)
        self._release(completion.cache_id)

    def release_cache(self, cache_id: int) -> None:
        self._release(cache_id)

    def preempt(self, request_id: str, cache_id: int) -> None:
        self._check_quiet()
        self._check_owner(request_id, cache_id)
        self._release(cache_id)

    def discard_prefill(self, cache_id: int) -> None:
        self._check_quiet()
        if cache_id not in self.kv:
            raise ContractError(f"there is no cache {cache_id} to discard")
        self._release(cache_id, forget=True)

    def _release(self, cache_id: int, *, forget: bool = False) -> None:
        self._forget_admissions({cache_id})
        self._requests.pop(cache_id, None)
        self._adapters.pop(cache_id, None)
        if any(cache_id in flight.items for flight in self._flights):
            self._leaving.add(cache_id)  # freed at that step's result
        else:
            self.kv.release(cache_id, forget=forget)

    def _check_owner(self, request_id: str, cache_id: int) -> None:
        owner = self._requests.get(cache_id)
        if owner != request_id:
            whose = f"of request {owner!r}" if owner is not None else "released, or was never admitted"
            raise ContractError(f"cache {cache_id} is {whose}", f"not of request {request_id!r}")

    def _check_quiet(self) -> None:
        if self._flights:
            raise ContractError("a step is in flight", next_step="take its result first")

    # The forward

    @final
    def submit(self, batch: UnifiedBatch) -> Submission:
        self._check(batch)
        start = perf_counter()
        self._state = ExecutorState.BUSY
        try:
            submission = self._launch(batch)
        except BaseException:
            self._fail()
            raise
        if isinstance(submission, (Deferred, NotSubmitted)):
            self._state = ExecutorState.BUSY if self._flights else ExecutorState.READY
            return submission
        flight = Flight(batch, submission, start, self._take)
        self._flights.append(flight)
        return flight

    def _take(self, flight: Flight) -> list[ItemResult]:
        """Wait for a step, check that it answers the batch, and only then count its KV as computed."""
        if not self._flights or self._flights[0] is not flight:
            raise ContractError(
                "the result of a step is taken twice, out of order, or after a step before it failed"
            )
        try:
            results = flight.pending.result()
            check_results(flight.batch, results)
            self._flights.popleft()
            for ahead in self._flights:
                for result in results:
                    ahead.learn(result)
        except BaseException:
            self._fail()
            raise
        for item, result in zip(flight.batch.items, results, strict=True):
            drafts = len(item.q_tokens) - 1 if item.verify else 0
            self.kv.commit(item.cache_id, flight.tokens(item)[: result.num_tokens], drafts=drafts)
        self._forget_admissions(set(flight.items))
        self._free_leaving()
        self._state = ExecutorState.BUSY if self._flights else ExecutorState.READY
        self._forwards += 1
        self._forward_seconds += perf_counter() - flight.start
        return results

    def _free_leaving(self) -> None:
        done = self._leaving - set().union(*(flight.items for flight in self._flights))
        self._leaving -= done
        for cache_id in sorted(done):
            self.kv.release(cache_id)

    def _fail(self) -> None:
        """What the pools held is lost, so no later prompt may find it; steps ahead are void."""
        self._state = ExecutorState.ERROR
        self._flights.clear()
        self._free_leaving()
        self.kv.forget_prefixes()
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
            memory_limit_bytes=self._memory_limit(),
        )

    def reset_peak_memory(self) -> None:
        """Nothing, unless a backend counts."""

    def _forget_admissions(self, used: set[int]) -> None:
        if self._admissions:
            self._admissions = {r: c for r, c in self._admissions.items() if c not in used}

    def _check(self, batch: UnifiedBatch) -> None:
        if len(self._flights) > 1 or (self._flights and self.recurrent_state_spec()):
            raise ContractError(
                f"{len(self._flights)} steps are in flight",
                "allowed: one, and none where a state is carried, since it is kept at a step's result",
                "take a result first",
            )
        if not batch.items:
            raise ContractError("the batch is empty")
        if batch.num_tokens > self._max_tokens:
            raise ContractError(f"the batch has {batch.num_tokens} tokens", f"allowed: {self._max_tokens}")
        if len({item.cache_id for item in batch.items}) != len(batch.items):
            raise ContractError("a cache stands twice in one batch")
        for item in batch.items:
            self._check_item(item)

    def _check_item(self, item: UnifiedItem) -> None:
        length = self._next_offset(item)
        if not item.q_tokens:
            raise ContractError(f"the item of cache {item.cache_id} has no tokens")
        if item.pos_offset != length:
            raise ContractError(
                f"cache {item.cache_id} starts at {item.pos_offset}", f"allowed: {length}, its length"
            )
        vocab = self.info.vocab_size
        if item.q_tokens != (IN_FLIGHT,) and not all(0 <= token < vocab for token in item.q_tokens):
            raise ContractError(
                f"cache {item.cache_id} has a token id out of range", f"allowed: 0 to {vocab - 1}"
            )
        if item.verify and not item.is_final_chunk:
            raise ContractError("a verify item cannot be an intermediate chunk")
        if item.verify and len(item.q_tokens) > 1 and self.recurrent_state_spec():
            raise ContractError(f"cache {item.cache_id} carries a state, which no rejected draft can leave")
        self.kv.check_reserved(item.cache_id, length + len(item.q_tokens))

    def _check_not_leaving(self, cache_id: int) -> None:
        if cache_id in self._leaving:
            raise ContractError(f"cache {cache_id} is released")

    def _next_offset(self, item: UnifiedItem) -> int:
        """The length of the item's cache, once the step in flight is done."""
        self._check_not_leaving(item.cache_id)
        length = self.kv.length(item.cache_id)
        if not self._flights:
            if item.q_tokens == (IN_FLIGHT,):
                raise ContractError(f"cache {item.cache_id} has no token in flight: no step is")
            return length
        offset = self._flights[0].next_offset(item)
        return length if offset is None else offset
