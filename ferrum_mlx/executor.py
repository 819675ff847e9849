"""The executor contract: what an engine may ask of any backend.

One primitive, `unified_decode`, runs prefill chunks, decode rows and verify rows in one forward;
`prefill`, `decode`, `forward_verify` and the batch forms are thin methods over it. Ids, lengths and
handles go in, token ids (or, where asked, logits as float32 numpy arrays) come out: no array type of
a backend crosses this file.

The executor owns the KV cache. An engine names a sequence by its `cache_id` alone: it is given by
`try_admit_prefill`, grows by `reserve_kv_slots`, shrinks by `truncate_kv` and ends with
`complete_cache` or `release_cache`.

Not yet part of it: prompt logprobs, admission targets, the waiter on the capacity version, LoRA, state
of recurrent layers, the event sink, and a decode row that names a token still in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, final

from ferrum_mlx.errors import ContractError
from ferrum_mlx.metrics import KVUsage

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded model, read from its configuration and weights."""

    model_id: str
    model_type: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # never hidden_size / num_heads: that is wrong for Qwen3 and Gemma
    vocab_size: int
    max_sequence_length: int
    dtype: str
    device: str
    quantization: str = "none"
    licence: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this executor can do with the model it holds."""

    max_batch_size: int
    max_sequence_length: int
    kv_capacity: int  # most tokens one request can hold: the context, or the pool if smaller
    attention_kinds: tuple[str, ...]
    speculative_decoding: bool
    tensor_parallel: bool
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    off: tuple[str, ...]  # fast paths that are off, each with its reason


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirements:
    """Bytes; kv_bytes_per_token is 2 · layers · kv_heads · head_dim · bytes an element."""

    parameter_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int


class ExecutorState(Enum):
    INITIALIZING = "initializing"
    READY = "ready"
    BUSY = "busy"
    ERROR = "error"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatus:
    state: ExecutorState
    forwards: int
    forward_seconds: float
    memory_bytes: int  # held now by the backend's arrays, weights and pools included
    peak_memory_bytes: int
    kv: KVUsage


class LogitsPolicy(Enum):
    """What an item wants for each row that reaches the output head."""

    SAMPLED = "sampled"
    GREEDY = "greedy"
    FULL = "full"  # the sampled token and the row's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How an item's rows are sampled; row i of a verify item has output position `position + i`.

    The noise of a row is a pure function of (seed, sample_index, output position).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    sample_index: int = 0
    position: int = 0

    def at(self, row: int) -> RowSampling:
        """The sampling of an item's row `row`."""
        return replace(self, position=self.position + row) if row else self


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedItem:
    """One sequence's share of a step.

    Attributes:
        q_tokens: the ids to compute, at least one.
        pos_offset: absolute position of the first of them; equals the cache's computed length.
        is_final_chunk: the last row is sampled; False for a chunk inside the prompt.
        verify: every row is sampled (q_tokens = the last token, then the drafts).
    """

    cache_id: int
    q_tokens: tuple[int, ...]
    pos_offset: int
    is_final_chunk: bool = True
    verify: bool = False
    sampling: RowSampling = RowSampling()
    logits: LogitsPolicy = LogitsPolicy.SAMPLED

    @property
    def num_rows_out(self) -> int:
        """Rows that reach the output head."""
        if self.verify:
            return len(self.q_tokens)
        return 1 if self.is_final_chunk else 0

    @property
    def row_sampling(self) -> list[RowSampling]:
        """The sampling of each of those rows."""
        if self.logits is LogitsPolicy.GREEDY:
            return [RowSampling()] * self.num_rows_out
        return [self.sampling.at(row) for row in range(self.num_rows_out)]


@dataclass(frozen=True, slots=True)
class UnifiedBatch:
    items: tuple[UnifiedItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.q_tokens) for item in self.items)


@dataclass(frozen=True, slots=True)
class ItemResult:
    """token_ids has one id a row that reached the head; logits is [rows, vocab_size] float32 if asked."""

    cache_id: int
    token_ids: tuple[int, ...]
    logits: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    cache_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not now: `shortfall` blocks are missing; try again when the capacity version has changed."""

    shortfall: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Never: `reason` says why in words for the user."""

    reason: str


Admission = Admitted | Deferred | Rejected


@dataclass(frozen=True, slots=True)
class KvSlotRequest:
    """Make positions below `target_len` writable."""

    cache_id: int
    target_len: int


@dataclass(frozen=True, slots=True)
class KvSlotReservation:
    """What a reservation did; blocks_before and _after are by cache_id, summed over the KV groups."""

    block_size: int
    total_blocks: int
    free_blocks_before: int
    free_blocks_after: int
    blocks_before: dict[int, int]
    blocks_after: dict[int, int]


class Pending(Protocol):
    """A submitted step. At most one is in flight."""

    def result(self) -> list[ItemResult]:
        """Wait for the device; one result an item, in the batch's order."""
        ...


class ModelExecutor(ABC):
    """One model on one backend. All calls come from the thread that built it."""

    info: ModelInfo

    # Lifecycle

    @abstractmethod
    def prepare_startup(self) -> None:
        """Compile, self-check and warm up before any request is accepted."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything; idempotent."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def memory(self) -> MemoryRequirements: ...

    @abstractmethod
    def status(self) -> ExecutorStatus: ...

    # Admission and KV

    @property
    @abstractmethod
    def maximum_active_sequences(self) -> int: ...

    @property
    @abstractmethod
    def maximum_scheduled_tokens(self) -> int: ...

    @property
    @abstractmethod
    def capacity_version(self) -> int:
        """Grows at every release of blocks; a new value allows a new probe and grants nothing."""

    @abstractmethod
    def try_admit_prefill(self, request_id: str, prompt: Sequence[int]) -> Admission:
        """Probe for a prompt; launches no device work and allocates no block."""

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
    def truncate_kv(self, cache_id: int, new_len: int) -> None:
        """Forget positions from new_len on and free the blocks past it; growing is a ContractError."""

    @abstractmethod
    def releasable_blocks(self, cache_id: int) -> int:
        """Blocks that releasing this cache would really free."""

    @abstractmethod
    def complete_cache(self, cache_id: int) -> None:
        """The request succeeded; its blocks are free again."""

    @abstractmethod
    def release_cache(self, cache_id: int) -> None:
        """Cancelled, failed or preempted; idempotent."""

    # The forward

    @abstractmethod
    def submit(self, batch: UnifiedBatch) -> Pending:
        """Check the batch, then start it.

        Raises:
            ContractError: before anything has changed, for a batch that breaks the contract.
        """

    @abstractmethod
    def forward(self, token_ids: Sequence[int]) -> np.ndarray:
        """One pass without a cache: logits [len(token_ids), vocab_size] float32, for scoring."""

    @final
    def unified_decode(self, batch: UnifiedBatch) -> list[ItemResult]:
        return self.submit(batch).result()

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
