"""What the torch backend promises beyond the contract: pools in place, few rows at the head, memory freed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ferrum_mlx.backends.torch import layers
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.reference import generate as library_generate
from ferrum_mlx.errors import UnsupportedModelError, UsageError

from .conftest import _info, _torch, tiny_config
from .driver import FULL, admit, generate, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140, 3, 3, 91, 200, 45, 6, 17]


def build(blocks: int = 40, **settings: object) -> TorchExecutor:
    executor = _torch(tiny_config(**settings), blocks)
    executor.prepare_startup()
    assert isinstance(executor, TorchExecutor)
    return executor


def test_a_step_writes_its_pools_in_place_and_copies_none() -> None:
    """A copied pool would be among the step's allocations; each is some 100 times its other arrays."""
    executor = build(blocks=20_000)
    pools = [array for s in executor._packed.storages for array in (s.keys, s.values)]
    places = [array.data_ptr() for array in pools]
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT, 0))
    with torch.profiler.profile(profile_memory=True) as profile:
        run(executor, item(cache, [1], len(PROMPT)))
        copied = pools[0].clone()  # the control
    largest = sorted(event.self_cpu_memory_usage for event in profile.events())[-2:]
    assert largest[0] < pools[0].nbytes / 4
    assert largest[1] >= copied.nbytes
    assert [array.data_ptr() for array in pools] == places


def test_only_sampled_rows_reach_the_output_head() -> None:
    executor = build(numerics="exact")  # runs the model's own Python at every step
    seen: list[int] = []
    head = executor._packed._model.lm_head
    head.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    a, b = admit(executor, PROMPT), admit(executor, PROMPT)
    run(executor, item(a, PROMPT[:9], 0, is_final_chunk=False))
    run(executor, item(a, PROMPT[9:], 9), item(b, PROMPT[:4], 0, is_final_chunk=False))
    run(executor, item(a, [1, 2, 3], len(PROMPT), verify=True))
    assert seen == [0, 1, 3]


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    executor = build(blocks=600, max_model_len=2000, max_num_batched_tokens=2000, max_num_seqs=24)
    long = admit(executor, [1] * 1900)
    run(executor, item(long, [1] * 1900, 0, is_final_chunk=False))
    short = [admit(executor, [2]) for _ in range(20)]

    def allocated(*items) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            run(executor, *items)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    alone = allocated(item(long, [3], 1900))
    together = allocated(item(long, [3], 1901), *(item(s, [3], 0) for s in short))
    padded = 20 * 1900 * 2 * 8 * 4  # the keys of one layer, had the short ones been padded
    assert together - alone < padded


def test_shutdown_gives_the_weights_back() -> None:
    executor = build()
    weights = weakref.ref(executor._packed._model.model)
    gc.collect()
    gc.disable()
    try:
        executor.shutdown()
        assert weights() is None
    finally:
        gc.enable()
    executor.shutdown()


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-model-len is 2,049; allowed: at most 2,048"):
        build(max_model_len=2049)


def test_two_engines_in_two_threads_keep_apart() -> None:
    """transformers knows attention by a name that all models share."""
    wanted = generate(build(), PROMPT, 20)
    executors = [build(), build()]  # here: the weights come from a generator that threads share
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = generate(executors[i], PROMPT, 20, chunk=3 + i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: wanted, 1: wanted}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_model_s_own_within_its_rounding(dtype: torch.dtype) -> None:
    whole = build()
    model = whole._packed._model.to(dtype)
    model.set_attn_implementation("eager")
    name = str(dtype).removeprefix("torch.")
    executor = TorchExecutor(model, replace(_info(), dtype=name), tiny_config(), free_memory=2**28)
    executor.prepare_startup()
    assert executor.memory().kv_bytes_per_token == whole.memory().kv_bytes_per_token // 2
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT[:7], 0, is_final_chunk=False))
    logits = run(executor, item(cache, PROMPT[7:], 7, logits=FULL))[0].logits
    assert logits is not None
    dense = executor.forward(PROMPT)[-1]
    np.testing.assert_allclose(logits[0], dense, atol=0.05 * np.abs(dense).max())


def test_the_library_s_own_generate_gives_our_ids() -> None:
    executor = build()
    ours = generate(executor, PROMPT, 12)
    ids, rows = library_generate(executor, PROMPT, 12)
    assert ids == ours == rows.argmax(-1).tolist()
    assert rows.shape == (12, executor.info.vocab_size)
    assert generate(executor, PROMPT, 12) == ours  # and leaves the model as it was


# What a model is looked at for at its load


def window_of(rule: Any, far: int = 64) -> int | None:
    return layers._window_of(rule, far)


def test_masks_are_told_apart() -> None:
    def causal(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query

    def window(size: int) -> Any:
        return lambda b, h, q, k: (k <= q) & (k > q - size)

    assert window_of(causal) is None
    assert window_of(window(8)) == 8
    assert window_of(window(1)) == 1
    assert window_of(window(64)) is None
    assert window_of(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8)) == 0  # chunks
    assert window_of(lambda b, h, q, k: (k <= q) | (k < 4)) == 0  # a prefix that sees itself
    assert window_of(lambda b, h, q, k: k >= 0) == 0
    assert window_of(lambda b, h, q, k: ((k <= q) & (k > q - 8)) | (k < 2)) == 0  # kept first tokens


@pytest.mark.parametrize("fault", ["mixes", "counts"])
def test_rows_that_are_not_treated_by_themselves_are_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

    if fault == "mixes":
        forward = LlamaMLP.forward
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) + x.cumsum(1) * 0.1)
    else:
        turn = LlamaRotaryEmbedding.forward
        monkeypatch.setattr(
            LlamaRotaryEmbedding,
            "forward",
            lambda self, x, position_ids: turn(self, x, torch.arange(x.shape[1])[None]),
        )
    with pytest.raises(UnsupportedModelError, match=r"change each other|counts positions|positions itself"):
        build()


def test_exact_numerics_that_do_not_hold_are_said_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrum_mlx.backends.torch.exact._in_tiles", lambda product, x: product(x))
    notes = build(numerics="exact").notes
    assert len(notes) == 1
    assert "does not hold to the bit for llama" in notes[0]
