"""What the MLX backend promises beyond the contract: exact rounding, pools in place, memory given back."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.batch import IN_FLIGHT, UnifiedBatch
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import UsageError
from ferrum_mlx.executor import Pending

from .conftest import _mlx, tiny_config
from .driver import FULL, admit, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140, 3, 3, 91, 200, 45, 6, 17]


def build(host: bool, blocks: int = 40, **settings: object) -> MLXExecutor:
    executor = _mlx(tiny_config(**settings), blocks, host=host)  # type: ignore[arg-type]
    executor.prepare_startup()
    assert isinstance(executor, MLXExecutor)
    return executor


def logits(executor: MLXExecutor, cuts: list[int], neighbours: int = 0) -> np.ndarray:
    """Logits of the prompt's last token, the prompt cut at `cuts`, beside decoding neighbours."""
    others = [admit(executor, [i + 1]) for i in range(neighbours)]
    cache = admit(executor, PROMPT)
    for step, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(PROMPT)], strict=True)):
        beside = [item(other, [50 + step], step) for other in others]
        part = item(cache, PROMPT[start:end], start, is_final_chunk=end == len(PROMPT), logits=FULL)
        result = run(executor, *beside, part)[-1]
    for wasted in (*others, cache):
        executor.release_cache(wasted)
    assert result.logits is not None
    return result.logits[0]


def test_exact_numerics_are_equal_bit_for_bit_however_a_prompt_is_cut_and_whoever_is_beside() -> None:
    executor = build(host=True, numerics="exact")
    whole = logits(executor, [])
    for cuts in ([19], [1, 2, 3], [7, 14], [8, 16, 19]):
        for neighbours in (0, 1, 5):
            np.testing.assert_array_equal(logits(executor, cuts, neighbours), whole)


def test_fast_numerics_are_not_and_the_test_above_could_tell() -> None:
    executor = build(host=True, numerics="fast")
    whole, cut = logits(executor, []), logits(executor, [19])
    assert not np.array_equal(whole, cut)
    np.testing.assert_allclose(whole, cut, atol=1e-4)


def test_a_decode_writes_its_pools_in_place() -> None:
    """A copied pool would show in the peak; each of these is some 256 times a step's other arrays."""
    executor = build(host=False, blocks=20_000)
    pool = executor._packed.storages[0].arrays()[0].nbytes
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT, 0))
    for step in range(4):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        run(executor, item(cache, [1 + step], len(PROMPT) + step))
        assert mx.get_peak_memory() - before < pool / 4
    kept = executor._packed.storages[0].arrays()[0][:1]  # negative control: a view makes the write a copy
    mx.eval(kept)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(executor, item(cache, [9], len(PROMPT) + 4))
    assert mx.get_peak_memory() - before >= pool
    del kept


def test_steps_ahead_write_their_pools_in_place() -> None:
    executor = build(host=False, blocks=20_000)
    assert executor.capabilities().one_step_ahead
    pool = executor._packed.storages[0].arrays()[0].nbytes
    cache = admit(executor, PROMPT)
    executor.reserve_kv_slots([KvSlotRequest(cache, len(PROMPT) + 12)])

    def submit(token: int, position: int) -> Pending:
        return executor.submit(UnifiedBatch((item(cache, [token], position),)))  # type: ignore[return-value]

    def peak(first: int, steps: int) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        flight = submit(7, first)
        for position in range(first + 1, first + steps):
            ahead = submit(IN_FLIGHT, position)
            flight.result()
            flight = ahead
        flight.result()
        return mx.get_peak_memory() - before

    run(executor, item(cache, PROMPT, 0))
    assert peak(len(PROMPT), 8) < pool / 4
    kept = executor._packed.storages[0].arrays()[0][:1]  # negative control: a view makes the write a copy
    mx.eval(kept)
    assert peak(len(PROMPT) + 8, 2) >= pool
    del kept


def test_a_model_that_cannot_be_cut_takes_one_step_at_a_time() -> None:
    host = build(host=True)
    assert not host.capabilities().one_step_ahead
    executor = build(host=False)
    executor._packed.take(executor._packed.routes[-1])  # the whole model a sequence at a time
    a, b = admit(executor, PROMPT), admit(executor, PROMPT[:9])
    run(executor, item(a, PROMPT, 0), item(b, PROMPT[:9], 0))
    assert not executor._halves.cut


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    executor = build(host=False, blocks=600, max_model_len=2000, max_num_batched_tokens=2000, max_num_seqs=24)
    long = admit(executor, [1] * 1900)
    run(executor, item(long, [1] * 1900, 0, is_final_chunk=False))
    short = [admit(executor, [2]) for _ in range(20)]

    def peak(*items) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        run(executor, *items)
        return mx.get_peak_memory() - before

    alone = peak(item(long, [3], 1900))
    together = peak(item(long, [3], 1901), *(item(s, [3], 0) for s in short))
    assert together < 3 * alone


@pytest.mark.parametrize("host", [False, True])
def test_only_sampled_rows_reach_the_output_head(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build(host=host)
    head = type(executor._model.model.embed_tokens)
    seen: list[int] = []
    original = head.as_linear
    monkeypatch.setattr(head, "as_linear", lambda self, x: (seen.append(x.shape[0]), original(self, x))[1])
    a, b = admit(executor, PROMPT), admit(executor, PROMPT)
    run(executor, item(a, PROMPT[:9], 0, is_final_chunk=False))
    run(executor, item(a, PROMPT[9:], 9), item(b, PROMPT[:4], 0, is_final_chunk=False))
    run(executor, item(a, [1, 2, 3], len(PROMPT), verify=True))
    assert seen == [1, 3]


@pytest.mark.parametrize("host", [False, True])
def test_shutdown_gives_the_weights_back(host: bool) -> None:
    executor = build(host=host)
    weights = weakref.ref(executor._model.model)
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
        build(host=True, max_model_len=2049)


def test_a_model_with_unknown_caches_is_refused_by_name() -> None:
    from ferrum_mlx.backends.mlx.layers import inspect_layers
    from ferrum_mlx.errors import UnsupportedModelError

    class Strange(nn.Module):
        def make_cache(self) -> list[object]:
            return [object()]

    with pytest.raises(UnsupportedModelError, match="strange keeps its state in object"):
        inspect_layers(Strange(), "strange")
