"""A backend without a model: the whole contract, scripted tokens, recorded calls.

Its "KV" is the token ids themselves, kept in slots like any backend's arrays, and the next token is
a hash of everything the slots say was before it. So a wrong block table, a lost position or a
truncation that did not happen changes the output, as it would with a model.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import (
    IN_FLIGHT,
    ItemResult,
    LogitsPolicy,
    RowSampling,
    TokenLogprobs,
    UnifiedBatch,
    UnifiedItem,
)
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.detokenizer import ByteLevelDetokenizer
from ferrum_mlx.errors import UsageError
from ferrum_mlx.executor import Pending
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup
from ferrum_mlx.messages import ChatMessage, ChatOptions
from ferrum_mlx.model_info import Capabilities, ExecutorState, MemoryRequirements, ModelInfo, StateSpec
from ferrum_mlx.thinking import Splitter, Tags

VOCAB_SIZE = 258  # the bytes, then end-of-sequence and begin-of-turn
EOS = 256
BYTES_PER_TOKEN = 4
THINKING = Tags("<think>", "</think>", ())
_AS_IS = ChatOptions()
Script = Callable[[Sequence[int], RowSampling], int]


def hashed(tokens: Sequence[int], sampling: RowSampling) -> int:
    """A lower-case letter or a space out of all tokens so far.

    Out of the noise, too, when sampling, and out of what is said to have been before, under penalties.
    """
    noise = (sampling.seed, sampling.sample_index, sampling.position) if sampling.params.temperature else ()
    seen = (tuple(sampling.prompt), tuple(sampling.output)) if sampling.params.penalizes else ()
    digest = hashlib.blake2b(repr((list(tokens), noise, *seen)).encode(), digest_size=2).digest()
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
    """`stateful` keeps the tokens in a state that cannot be rolled back, as recurrent layers do.

    `one_step_ahead` asks the engine to submit a step before the result of the one before it is read.
    """

    def __init__(
        self,
        config: EngineConfig,
        script: Script = hashed,
        *,
        stateful: bool = False,
        num_states: int = 0,
        one_step_ahead: bool = False,
    ) -> None:
        if config.kv_bits is not None:
            raise UsageError(
                f"--kv-bits is {config.kv_bits}, and the KV of the fake backend is token ids",
                next_step="leave --kv-bits away, or take another backend",
            )
        max_len = config.max_model_len or DEFAULT_CONTEXT
        kv_memory = config.kv_memory or 4 * max_len * BYTES_PER_TOKEN
        num_blocks = max(1, kv_memory // (BYTES_PER_TOKEN * config.block_size))
        group = KVGroup(layers=(0,), window=None, bytes_per_token=BYTES_PER_TOKEN)
        super().__init__(
            KVManager(
                [group],
                [num_blocks],
                config.block_size,
                config.max_num_batched_tokens,
                prefix_cache=config.prefix_cache,
                salt=("fake",),
                num_states=(num_states or 2 * config.max_num_seqs) if stateful else 0,
                copy_state=self._copy_state if stateful else None,
            ),
            max_model_len=max_len,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            adapters=dict(config.adapters),  # not read: the script ignores them
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
        self.batches: deque[UnifiedBatch] = deque(maxlen=1000)  # the latest that were run, for tests
        self._stateful, self._one_step_ahead = stateful, one_step_ahead
        self._sampled: dict[int, int] = {}  # by cache, in the latest launch
        self._states: dict[int, tuple[int, ...]] = {}  # by slot
        self._slots = np.full((num_blocks + 1) * config.block_size, -1, dtype=np.int32)

    def prepare_startup(self) -> None:
        self._state = ExecutorState.READY

    def shutdown(self) -> None:
        self._state = ExecutorState.SHUTDOWN
        self.kv.capacity.close()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            prefill_while_decoding=self._max_tokens,
            prefix_cache=self.kv.prefix.enabled,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=("full",),
            speculative_decoding=not self._stateful,
            one_step_ahead=self._one_step_ahead,
            tensor_parallel=False,
            dtypes=("int32",),
            devices=("none",),
            off=(),
        )

    def memory(self) -> MemoryRequirements:
        return MemoryRequirements(
            parameter_bytes=0, kv_bytes_per_token=BYTES_PER_TOKEN, kv_pool_bytes=self._slots.nbytes
        )

    def recurrent_state_spec(self) -> tuple[StateSpec, ...] | None:
        state = StateSpec(layer=0, shapes=((1,),), dtype="int32", num_bytes=BYTES_PER_TOKEN)
        return (state,) if self._stateful else None

    def forward(self, token_ids: Sequence[int], *, adapter: str = "", exact_kv: bool = False) -> np.ndarray:
        self.adapter_number(adapter)
        return np.stack([self._logits(token_ids[: i + 1]) for i in range(len(token_ids))])

    def _memory_in_use(self) -> tuple[int, int]:
        return self._slots.nbytes, self._slots.nbytes

    def _launch(self, batch: UnifiedBatch) -> Pending:
        self.batches.append(batch)
        results = [self._run(self._resolved(item)) for item in batch.items]
        self._sampled = {result.cache_id: result.token_ids[-1] for result in results if result.token_ids}
        return _Done(results)

    def _resolved(self, item: UnifiedItem) -> UnifiedItem:
        if item.q_tokens != (IN_FLIGHT,):
            return item
        return replace(item, q_tokens=(self._sampled[item.cache_id],))

    def _run(self, item: UnifiedItem) -> ItemResult:
        end = item.pos_offset + len(item.q_tokens)
        slots = self.kv.slot_mapping(item.cache_id, 0, 0, end)
        self._slots[slots[item.pos_offset :]] = item.q_tokens
        known = self._slots[slots].tolist()
        if self._stateful:
            slot = self.kv.state_slot(item.cache_id)
            self._states[slot] += item.q_tokens
            known = list(self._states[slot])
        head = [known[: end - item.num_rows_out + 1 + i] for i in range(item.num_rows_out)]
        sampled = list(zip(head[len(head) - item.num_sampled :], item.row_sampling, strict=True))
        tokens = [_permitted(self.script(before, sampling), sampling) for before, sampling in sampled]
        return ItemResult(
            item.cache_id,
            tuple(tokens),
            np.stack(list(map(self._logits, head))) if head and item.logits is LogitsPolicy.FULL else None,
            logprobs=tuple(
                _scored(self._logits(before), token, sampling.params.logprobs)
                for (before, sampling), token in zip(sampled, tokens, strict=True)
                if sampling.params.logprobs is not None
            ),
            prompt_logprobs=tuple(
                _scored(self._logits(before), target, item.sampling.params.prompt_logprobs or 0)
                for before, target in zip(head, item.targets)  # noqa: B905 - the last row may have none
            ),
        )

    def _logits(self, before: Sequence[int]) -> np.ndarray:
        return _one_hot(self.script(before, RowSampling()))

    def _copy_state(self, source: int | None, target: int) -> None:
        self._states[target] = () if source is None else self._states[source]


def _one_hot(token: int) -> np.ndarray:
    row = np.zeros(VOCAB_SIZE, dtype=np.float32)
    row[token] = 1.0
    return row


def _permitted(token: int, sampling: RowSampling) -> int:
    """The token, or the next one that is not barred."""
    barred = sampling.barred
    return next(t % VOCAB_SIZE for t in range(token, token + VOCAB_SIZE) if t % VOCAB_SIZE not in barred)


def _scored(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs, kind="stable")[:count].tolist()
    top = tuple((i, float(logprobs[i])) for i in best)
    return TokenLogprobs(token, float(logprobs[token]), int((logprobs > logprobs[token]).sum()) + 1, top)


class FakeCodec:
    """A byte is a token; a conversation is its contents, each behind a begin-of-turn.

    What a template would be given besides stands before them as JSON. It thinks between <think> tags.
    """

    eos_token_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = _AS_IS) -> list[int]:
        settings = {key: value for key, value in asdict(options).items() if value != getattr(_AS_IS, key)}
        head = json.dumps(settings).encode() if settings else b""
        return [*head, *(token for message in messages for token in (EOS + 1, *message["content"].encode()))]

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(word.encode()) for word in words)

    def detokenizer(self, *, with_tags: bool = False) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(lambda token: bytes([token]) if token < EOS else b"")

    def splitter(self, prompt: Sequence[int]) -> Splitter:
        prompt_end = bytes(token for token in prompt[-16:] if token < EOS)
        return THINKING.splitter(prompt_end.decode(errors="replace"))
