"""Facts of a loaded model and of the executor that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ferrum_mlx import nearties
from ferrum_mlx.metrics import KVUsage


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
    computes_in: str = ""  # the dtype of packed weights' products, where it is not `dtype`
    kv_dtype: str = ""  # what keys and values are kept in, where it is not `dtype`
    quantization: str = "none"
    quality: str = ""  # what quantizing on load cost, in words
    licence: str = "unknown"

    @property
    def rounding(self) -> str:
        """Whose rounding its logits show: the coarsest of those they go through."""
        return max(self.computes_in or self.dtype, self.kv_dtype, key=nearties.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state that one layer carries from token to token: shapes without the batch, and the dtype."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this executor can do with the model it holds.

    Attributes:
        kv_capacity: most tokens one request can hold: the context, or the pool if smaller.
        prefill_while_decoding: most prompt tokens a step should take while anything decodes, so that
            running streams keep going; a table by device, never driven by the clock.
        max_verify_rows: most rows of a verify item that the device's attention takes in one go; None where
            more of them cost no more each.
        one_step_ahead: a step is worth submitting before the result of the one before it is read.
        off: fast paths that are off, each with its reason.
    """

    max_batch_size: int
    max_sequence_length: int
    kv_capacity: int
    prefill_while_decoding: int
    attention_kinds: tuple[str, ...]
    prefix_cache: bool
    speculative_decoding: bool
    one_step_ahead: bool
    tensor_parallel: bool
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    off: tuple[str, ...]
    max_verify_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirements:
    """Bytes; kv_bytes_per_token is 2 · layers · kv_heads · head_dim · bytes an element, less if quantized.

    Attributes:
        kv_tokens: that the pools hold, of all sequences together; 0 where windows alone bound a sequence.
        smallest_pool_bytes: of the smallest array that a step's writes might copy; 0 where all are
            written in place by construction.
        kv_pool_bytes: of the pools, and of every slot for a state.
        state_bytes: of one sequence's recurrent layers, however long it is.
        state_slots: states that may be held at once, snapshots included; memory is taken as they are used.
    """

    parameter_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    kv_tokens: int = 0
    smallest_pool_bytes: int = 0
    state_bytes: int = 0
    state_slots: int = 0


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
    memory_limit_bytes: int = 0  # most that the device gives without swapping; 0 where nobody knows
