"""A backend without a model: the whole contract, scripted tokens, recorded calls.

Its "KV" is the token ids themselves, kept in slots like any backend's arrays, and the next token is
a hash of everything the slots say was before it. So a wrong block table, a lost position or a
truncation that did not happen changes the output, as it would with a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedBatch, UnifiedItem
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.detokenizer import ByteLevelDetokenizer
from ferrum_mlx.executor import Pending
from ferrum_mlx.kv.manager import KVGroup, KVManager
from ferrum_mlx.model_info import Capabilities, ExecutorState, MemoryRequirements, ModelInfo

VOCAB_SIZE = 258  # the bytes, then end-of-sequence and begin-of-turn
EOS = 256
BYTES_PER_TOKEN = 4
Script = Callable[[Sequence[int], RowSampling], int]


def hashed(tokens: Sequence[int], sampling: RowSampling) -> int:
    """A lower-case letter or a space out of all tokens so far (and, when sampling, the noise)."""
    noise = (sampling.seed, sampling.sample_index, sampling.position) if sampling.params.temperature else ()
    digest = hashlib.blake2b(repr((list(tokens), noise)).encode(), digest_size=2).digest()
    return b"abcdefghijklmnopqrstuvwxyz     "[int.from_bytes(digest, "big") % 31]


def scripted(answer: Sequence[int], prompt_len: int) -> Script:
    """Say `answer`, then end-of-sequence, behind a prompt of that many tokens."""
    return lambda tokens, _: answer[i] if (i := len(tokens) - prompt_len) < len(answer) else EOS


@dataclass(frozen=True, slots=True)
class _Done:
    results: list[ItemResult]

    def result(self) -> list[ItemResult]:
        return self.results


class FakeExecutor(PagedExecutor):
    def __init__(self, config: EngineConfig, script: Script = hashed) -> None:
        max_len = config.max_model_len or DEFAULT_CONTEXT
        kv_memory = config.kv_memory or 4 * max_len * BYTES_PER_TOKEN
        num_blocks = max(1, kv_memory // (BYTES_PER_TOKEN * config.block_size))
        group = KVGroup(layers=(0,), window=None, bytes_per_token=BYTES_PER_TOKEN)
        super().__init__(
            KVManager([group], [num_blocks], config.block_size, config.max_num_batched_tokens),
            max_model_len=max_len,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
        )
        self.info = ModelInfo(
            model_id="fake",
            model_type="fake",
            num_parameters=0,
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=max_len,
            dtype="int32",
            device="none",
        )
        self.script = script
        self.batches: list[UnifiedBatch] = []  # every batch that was run, for tests
        self._slots = np.full((num_blocks + 1) * config.block_size, -1, dtype=np.int32)

    def prepare_startup(self) -> None:
        self._state = ExecutorState.READY

    def shutdown(self) -> None:
        self._state = ExecutorState.SHUTDOWN

    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            prefill_while_decoding=self._max_tokens,
            prefix_cache=False,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=("full",),
            speculative_decoding=True,
            tensor_parallel=False,
            dtypes=("int32",),
            devices=("none",),
            off=(),
        )

    def memory(self) -> MemoryRequirements:
        return MemoryRequirements(
            parameter_bytes=0, kv_bytes_per_token=BYTES_PER_TOKEN, kv_pool_bytes=self._slots.nbytes
        )

    def forward(self, token_ids: Sequence[int]) -> np.ndarray:
        rows = [self.script(token_ids[: i + 1], RowSampling()) for i in range(len(token_ids))]
        return np.stack([_one_hot(token) for token in rows])

    def _memory_in_use(self) -> tuple[int, int]:
        return self._slots.nbytes, self._slots.nbytes

    def _launch(self, batch: UnifiedBatch) -> Pending:
        self.batches.append(batch)
        return _Done([self._run(item) for item in batch.items])

    def _run(self, item: UnifiedItem) -> ItemResult:
        end = item.pos_offset + len(item.q_tokens)
        slots = self.kv.slot_mapping(item.cache_id, 0, 0, end)
        self._slots[slots[item.pos_offset :]] = item.q_tokens
        known = self._slots[slots].tolist()
        first = end - item.num_rows_out + 1
        tokens = [self.script(known[: first + i], sampling) for i, sampling in enumerate(item.row_sampling)]
        logits = (
            np.stack([_one_hot(t) for t in tokens]) if tokens and item.logits is LogitsPolicy.FULL else None
        )
        return ItemResult(item.cache_id, tuple(tokens), logits)


def _one_hot(token: int) -> np.ndarray:
    row = np.zeros(VOCAB_SIZE, dtype=np.float32)
    row[token] = 1.0
    return row


class FakeCodec:
    """A byte is a token; a conversation is its contents, each behind a begin-of-turn."""

    eos_token_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [token for message in messages for token in (EOS + 1, *message["content"].encode())]

    def detokenizer(self) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(lambda token: bytes([token]) if token < EOS else b"")
