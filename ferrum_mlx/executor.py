"""The executor contract: what an engine may ask of any backend.

One primitive, `unified_decode`, runs prefill chunks, decode rows and verify rows in one forward;
`prefill`, `decode`, `forward_verify` and the batch forms are thin methods over it. Ids, lengths and
handles go in, token ids (or, where asked, logits as float32 numpy arrays) come out (ferrum_mlx.batch):
no array type of a backend crosses this file.

The executor owns the KV cache. An engine names a sequence by its `cache_id` alone: it is given by
`try_admit_prefill`, grows by `reserve_kv_slots`, shrinks by `truncate_kv` and ends with
`complete_cache`, `release_cache` or `preempt`.

A step may be submitted while the one before it is in flight (batch.IN_FLIGHT), where
`capabilities().one_step_ahead` says so; results are taken in order. What a step in flight touches is
freed at its result, and `preempt`, `truncate_kv` and `discard_prefill` want none in flight.

A LoRA adapter belongs to a sequence from its admission on: a step's rows go through it, or through none,
each by its own sequence, and a prefix is found by sequences of the same adapter alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, final

from ferrum_mlx.batch import ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import (
    Admission,
    CacheCompletion,
    CapacityVersion,
    Deferred,
    KvSlotRequest,
    KvSlotReservation,
    NotSubmitted,
)
from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.metrics import CacheMetrics, KVMap, KVUsage, LoraMetrics
from ferrum_mlx.model_info import Capabilities, ExecutorStatus, MemoryRequirements, ModelInfo, StateSpec

if TYPE_CHECKING:
    import numpy as np


class Pending(Protocol):
    """A submitted step. At most two are in flight: one, and the one ahead of its result."""

    def result(self) -> list[ItemResult]:
        """Wait for the device; one result an item, in the batch's order: the step has completed."""
        ...


Submission = Pending | Deferred | NotSubmitted


class ModelExecutor(ABC):
    """One model on one backend. All calls come from the thread that built it."""

    info: ModelInfo

    # Lifecycle

    @abstractmethod
    def prepare_startup(self) -> None:
        """Compile, self-check and warm up before any request is accepted."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything; idempotent. Whoever waits on the capacity version is woken."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def memory(self) -> MemoryRequirements: ...

    @abstractmethod
    def status(self) -> ExecutorStatus: ...

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Count status().peak_memory_bytes from now on, where the backend counts it at all."""

    @abstractmethod
    def recurrent_state_spec(self) -> tuple[StateSpec, ...] | None:
        """What a sequence carries besides its KV; None for attention-only models.

        The state exists before the first forward of a sequence, is freed with its cache, and cannot be
        rolled back: truncate_kv of such a cache is a ContractError.
        """

    # Admission and KV

    @property
    @abstractmethod
    def maximum_active_sequences(self) -> int: ...

    @property
    @abstractmethod
    def maximum_scheduled_tokens(self) -> int: ...

    @property
    @abstractmethod
    def capacity(self) -> CapacityVersion:
        """Bumped at every release of blocks; a new value allows a new probe and grants nothing."""

    @abstractmethod
    def try_admit_prefill(
        self, request_id: str, prompt: Sequence[int], *, use_prefix: bool = True, adapter: str = ""
    ) -> Admission:
        """Probe for a prompt; launches no device work and allocates no block.

        An admission holds references on the cached blocks it hit, until a forward consumes it or it
        is cancelled. Deferred with no shortfall: another request is computing this very prefix, or
        the sequences are all taken.

        Args:
            use_prefix: False computes every token (prompt logprobs need them all).
            adapter: the LoRA adapter that the sequence's tokens go through; "" is none.

        Raises:
            ContractError: no adapter of that name is loaded.
        """

    @abstractmethod
    def cancel_prefill_admission(self, request_id: str) -> bool:
        """Give up an admission that no forward has used yet; False if there is none."""

    @abstractmethod
    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Allocate for all or for none; duplicates merge by maximum.

        Raises:
            CapacityError: the pool is short now.
            ContextLengthError: a target no pool of this size can hold.
            ContractError: an unknown cache.
        """

    @abstractmethod
    def kv_capacity_snapshot(self) -> KVUsage: ...

    @abstractmethod
    def kv_map(self) -> KVMap:
        """The state of every block, for people to look at; costs time linear in the blocks."""

    @abstractmethod
    def cache_metrics(self) -> CacheMetrics: ...

    @abstractmethod
    def lora_metrics(self) -> LoraMetrics: ...

    @abstractmethod
    def truncate_kv(self, cache_id: int, new_len: int) -> None:
        """Forget positions from new_len on and free the blocks past it; those before are verified by it.

        Called after every forward of a verify item, also if all of its drafts were accepted.

        Raises:
            ContractError: it would grow, cut into a block that others share, or roll back a state.
        """

    @abstractmethod
    def releasable_blocks(self, cache_id: int) -> int:
        """Blocks that releasing this cache would really free: those it shares with no other."""

    @abstractmethod
    def complete_cache(self, completion: CacheCompletion) -> None:
        """The request succeeded; its blocks are free again, the verified full ones still findable.

        Here and in release_cache: free at the result of the last step in flight that touches them.
        """

    @abstractmethod
    def release_cache(self, cache_id: int) -> None:
        """Cancelled or failed; idempotent."""

    @abstractmethod
    def preempt(self, request_id: str, cache_id: int) -> None:
        """A fence: when it returns no forward uses the blocks, and they are free.

        Raises:
            ContractError: that cache is not this request's (a stale id fails closed).
        """

    @abstractmethod
    def discard_prefill(self, cache_id: int) -> None:
        """Drop a prefill whose sampling or commit failed: none of its blocks stays findable."""

    # The forward

    @abstractmethod
    def submit(self, batch: UnifiedBatch) -> Submission:
        """Check the batch, then start it.

        Returns:
            Pending; or Deferred or NotSubmitted, and then nothing has reached the device.

        Raises:
            ContractError: before anything has changed, for a batch that breaks the contract.
        """

    @abstractmethod
    def forward(self, token_ids: Sequence[int], *, adapter: str = "", exact_kv: bool = False) -> np.ndarray:
        """One pass without our pools: logits [len(token_ids), vocab_size] float32, for scoring.

        Where pools quantize K and V (EngineConfig.kv_bits) these are rounded too, unless `exact_kv`.
        """

    @final
    def unified_decode(self, batch: UnifiedBatch) -> list[ItemResult]:
        """submit and result in one.

        Raises:
            CapacityError: the step was deferred.
            FerrumError: the step was not submitted.
        """
        submission = self.submit(batch)
        if isinstance(submission, Deferred):
            raise CapacityError(submission.shortfall, 0)
        if isinstance(submission, NotSubmitted):
            raise submission.error
        return submission.result()

    @final
    def batch_prefill(self, items: Sequence[UnifiedItem]) -> list[ItemResult]:
        return self.unified_decode(UnifiedBatch(tuple(items)))

    @final
    def prefill(self, item: UnifiedItem) -> ItemResult:
        return self.batch_prefill([item])[0]

    @final
    def batch_decode(self, items: Sequence[UnifiedItem]) -> list[ItemResult]:
        if any(len(item.q_tokens) != 1 for item in items):
            raise ContractError("a decode item carries exactly one token")
        return self.unified_decode(UnifiedBatch(tuple(items)))

    @final
    def decode(self, item: UnifiedItem) -> ItemResult:
        return self.batch_decode([item])[0]

    @final
    def forward_verify(self, item: UnifiedItem) -> ItemResult:
        if not item.verify:
            raise ContractError("a verify item has verify=True, so that every row is sampled")
        return self.unified_decode(UnifiedBatch((item,)))[0]
