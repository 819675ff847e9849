"""Models whose modules run one sequence at a time: what they round alike, and what they leave in place."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx import zoo
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.batch import LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.config import EngineConfig

from . import drive

# mlx-lm computes one token by another formula than several: MLA in the latent space, state-space layers
# (mamba2's kind) and lightning attention by a step of the recurrence instead of a scan over a chunk.
BY_LENGTH = {
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granitemoehybrid",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "longcat_flash",
    "longcat_flash_ngram",
    "mamba2",
    "mistral4",
    "nemotron_h",
    "nemotron_h/moe",
    "plamo2",
}


def _admit(executor: MLXExecutor, prompt: list[int], name: str) -> int:
    admission = executor.try_admit_prefill(name, prompt, use_prefix=False)
    assert isinstance(admission, Admitted)
    return admission.cache_id


def _step(executor: MLXExecutor, *parts: tuple[int, list[int], int]) -> np.ndarray:
    """One forward of (cache, ids, start); the last part's last logits."""
    executor.reserve_kv_slots([KvSlotRequest(c, start + len(ids)) for c, ids, start in parts])
    items = [
        UnifiedItem(cache_id=c, q_tokens=tuple(ids), pos_offset=start, logits=LogitsPolicy.FULL)
        for c, ids, start in parts
    ]
    logits = executor.batch_prefill(items)[-1].logits
    assert logits is not None
    return logits[-1]


def _logits(executor: MLXExecutor, cuts: list[int], neighbours: int = 0) -> np.ndarray:
    """Of the prompt's last token, the prompt cut at `cuts`, beside neighbours that decode."""
    prompt = drive.prompts()[0]
    others = [_admit(executor, [i + 1], f"other {i}") for i in range(neighbours)]
    cache = _admit(executor, prompt, "prompt")
    for step, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(prompt)], strict=True)):
        beside = [(other, [50 + step], step) for other in others]
        row = _step(executor, *beside, (cache, prompt[start:end], start))
    for used in (*others, cache):
        executor.release_cache(used)
    return row


@pytest.mark.parametrize("name", zoo.LOOPED)
def test_exact_numerics_hold_to_the_bit_or_are_said_not_to(name: str) -> None:
    executor, _ = drive.executor(name, host=True, block_size=8, chunk=64, budget=64)
    executor.prepare_startup()
    said = [note for note in executor.notes if "does not hold to the bit" in note]
    assert bool(said) is (name in BY_LENGTH), "a table to be corrected, if mlx-lm has changed"
    whole = _logits(executor, [])
    np.testing.assert_array_equal(_logits(executor, [], 3), whole)
    for cuts in ([8, 16, 30], [36], [7, 36]):
        alone, beside = _logits(executor, cuts), _logits(executor, cuts, 3)
        if not said:
            np.testing.assert_array_equal(alone, whole)
            np.testing.assert_array_equal(beside, whole)
        np.testing.assert_allclose(beside, whole, atol=1e-4 * np.abs(whole).max())


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "gpt_bigcode", "falcon_h1"])
def test_sequences_in_turn_write_the_pools_in_place(name: str) -> None:
    """Each reads the pool that the next one writes to; a view kept too long would make the write a copy."""
    config = EngineConfig(block_size=8, max_num_batched_tokens=256, max_model_len=512, kv_memory=200 << 20)
    executor = MLXExecutor(zoo.build(name), zoo.info(name), config, host=False, free_memory=2**31)
    executor.prepare_startup()
    pool = max(array.nbytes for storage in executor._packed.storages for array in storage.arrays())
    prompt = list(range(20))
    caches = [_admit(executor, prompt, str(i)) for i in range(5)]
    for cache in caches:
        _step(executor, (cache, prompt, 0))
    for step in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        _step(executor, *((cache, [step], 20 + step) for cache in caches))
        assert mx.get_peak_memory() - before < 0.75 * pool


@pytest.mark.parametrize("name", ["gemma2", "gpt_bigcode", "qwen3_next"])
def test_shutdown_gives_the_weights_back(name: str) -> None:
    """Whatever was looped is its own class again, and nobody holds it."""
    executor, _ = drive.executor(name, host=True, block_size=8, chunk=64, budget=64)
    executor.prepare_startup()
    assert executor.capabilities().off
    layer = weakref.ref(executor._model.layers[0])
    gc.collect()
    gc.disable()
    try:
        executor.shutdown()
        assert layer() is None
    finally:
        gc.enable()
