"""The two sides of the comparison: mlx-lm alone on a prompt, and our engine on all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.backends.mlx import zoo
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.zoo import VOCAB
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.messages import Delta, Failed, Stepped, Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.guesses import Guesses, spoiled

ENTER_AT = (0, 2, 3, 5)  # steps
NEW_TOKENS = 16
GRID = ((8, 7, 24), (16, 64, 128), (32, 512, 512))  # block size, longest chunk, token budget


def prompts() -> list[list[int]]:
    """37 and 19 tokens are past every window; 37, and 19 with its output, past the original context."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in (37, 5, 1, 19)]


# mlx-lm alone


@cache
def reference_model(name: str) -> nn.Module:
    """A copy that no executor has touched."""
    return zoo.build(name)


@cache
def reference_ids(name: str) -> list[list[int]]:
    """Greedy ids of each prompt alone on mlx-lm's own caches."""
    return [greedy(reference_model(name), prompt) for prompt in prompts()]


def greedy(model: nn.Module, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    native, fed, output = make_prompt_cache(model), prompt, []
    for _ in range(new_tokens):
        output.append(int(mx.argmax(model(mx.array([fed]), cache=native)[0, -1])))
        fed = output[-1:]
    return output


def reference_logits(name: str, ids: Sequence[int]) -> np.ndarray:
    """[len(ids), vocab]"""
    model = reference_model(name)
    return np.array(model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0])


# Ours


def executor(
    name: str, *, host: bool, block_size: int, chunk: int, budget: int, max_num_seqs: int = 64
) -> tuple[MLXExecutor, EngineConfig]:
    config = EngineConfig(
        numerics="exact",
        block_size=block_size,
        max_prefill_chunk=chunk,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=128,
    )
    return MLXExecutor(zoo.build(name), zoo.info(name), config, host=host, free_memory=2**30), config


@dataclass(frozen=True, slots=True)
class Run:
    outputs: list[list[int]]
    mixed_steps: int  # with a prefill chunk and a decode in one forward
    drafted: int = 0
    accepted: int = 0


def run_engine(
    executor: ModelExecutor,
    config: EngineConfig,
    new_tokens: int = NEW_TOKENS,
    answers: Sequence[Sequence[int]] = (),
) -> Run:
    """All prompts, entering at different steps; with `answers`, drafts of which every third one is wrong."""
    drafts = Guesses(spoiled({str(i): ids for i, ids in enumerate(answers)}, VOCAB)) if answers else None
    engine = Engine(executor, FakeCodec(), config, backend="mlx", backend_reason="a test", speculation=drafts)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in ENTER_AT]
    step = mixed = 0
    while step <= max(ENTER_AT) or engine.has_work():
        for i, (enter, prompt) in enumerate(zip(ENTER_AT, prompts(), strict=True)):
            if enter == step:
                engine.submit(Submit(str(i), prompt, params))
        for event in engine.step():
            if isinstance(event, Delta):
                outputs[int(event.request_id)] += event.token_ids
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Stepped):
                mixed += bool(event.stats.prefill_tokens and event.stats.decode_tokens)
        step += 1
    assert [len(ids) for ids in outputs] == [new_tokens] * len(outputs)  # an output cut short proves nothing
    if drafts is None:
        return Run(outputs, mixed)
    return Run(outputs, mixed, drafts.stats().drafted, drafts.stats().accepted)


def scatter_blocks(executor: ModelExecutor) -> list[int]:
    """Hold every other block of the pool, so that no sequence gets two neighbours; returns the holders."""
    caches = []
    while isinstance(admission := executor.try_admit_prefill(f"holder {len(caches)}", [0]), Admitted):
        executor.reserve_kv_slots([KvSlotRequest(admission.cache_id, 1)])
        caches.append(admission.cache_id)
    for cache_id in caches[1::2]:
        executor.release_cache(cache_id)
    return caches[::2]
