"""Quantized KV against the model's own precision: a bound, on both backends; and what must not come near it.

The pair matrix has the other half: with the same precision on both sides everything is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.mlx.host_quantized import HostPool
from ferrum_mlx.backends.mlx.quantized import QuantizedPool
from ferrum_mlx.batch import LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.engine import Engine
from ferrum_mlx.verify.likelihood import nll

from . import pairs

KINDS = ["llama", "gemma3_text", "deepseek_v3"]  # plain; with windows; with a latent that others are made of
# Root mean square of what logits move by, as a share of their own: random models are far more sensitive than
# trained ones. The controls below show what the bounds are worth.
BOUNDS = {8: 0.1, 4: 0.65}
TURNED = 1 / 8  # of that, at most, comes of codes that rounding turns over: two routes round differently
Build = Callable[[str, int | None], PagedExecutor]


def _mlx(name: str, bits: int | None) -> PagedExecutor:
    return _executor(pairs.build(name, {"kv_bits": bits}))


def _torch(name: str, bits: int | None) -> PagedExecutor:
    from .test_torch_pairs import _build

    return _executor(_build(name, {"kv_bits": bits}))


def _executor(engine: Engine) -> PagedExecutor:
    assert isinstance(engine.executor, PagedExecutor)
    return engine.executor


def paged(executor: PagedExecutor, ids: list[int]) -> np.ndarray:
    """[len(ids), vocab], each row out of the pools."""
    admission = executor.try_admit_prefill("read", ids, use_prefix=False)
    assert isinstance(admission, Admitted)
    executor.reserve_kv_slots([KvSlotRequest(admission.cache_id, len(ids))])
    item = UnifiedItem(
        cache_id=admission.cache_id, q_tokens=tuple(ids), pos_offset=0, verify=True, logits=LogitsPolicy.FULL
    )
    logits = executor.forward_verify(item).logits
    executor.truncate_kv(admission.cache_id, len(ids))
    executor.release_cache(admission.cache_id)
    assert logits is not None
    return logits


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean()))


CASES = [(_mlx, 8), (_mlx, 4)] + ([(_torch, 8)] if find_spec("torch") else [])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("build", "bits"), CASES)
def test_logits_stay_within_the_bound_and_are_the_rounded_reference_s(
    build: Build, bits: int, name: str
) -> None:
    ids = pairs.prompt(40)
    executor = build(name, bits)
    whole, rounded, ours = executor.forward(ids, exact_kv=True), executor.forward(ids), paged(executor, ids)
    assert executor.cache_metrics().kv_dtype == f"int{bits}"
    assert apart(ours, whole) < BOUNDS[bits]
    assert apart(ours, rounded) < TURNED * apart(ours, whole)
    assert abs(nll(ours, ids) / nll(whole, ids) - 1) < BOUNDS[bits]
    executor.shutdown()


def test_two_bits_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: of 4 bits two are lost."""
    true = HostPool.__getitem__

    def coarse(self: HostPool, where: slice | np.ndarray) -> np.ndarray:
        low = 0x33 if self._bits == 4 else 0x3F
        kept, self._codes = self._codes, self._codes & ~np.uint8(low)
        try:
            return true(self, where)
        finally:
            self._codes = kept

    ids = pairs.prompt(40)
    executor = _mlx("llama", 4)
    whole = executor.forward(ids, exact_kv=True)
    assert apart(paged(executor, ids), whole) < BOUNDS[4]
    monkeypatch.setattr(HostPool, "__getitem__", coarse)
    assert apart(paged(executor, ids), whole) > BOUNDS[4]


def test_scales_of_other_slots_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: codes are right, the scales are those of the slot before."""
    true = HostPool.__getitem__

    def shuffled(self: HostPool, where: slice | np.ndarray) -> np.ndarray:
        kept, self._scales = self._scales, np.roll(self._scales, 1, axis=0)
        try:
            return true(self, where)
        finally:
            self._scales = kept

    ids = pairs.prompt(40)
    executor = _mlx("llama", 8)
    whole = executor.forward(ids, exact_kv=True)
    monkeypatch.setattr(HostPool, "__getitem__", shuffled)
    assert apart(paged(executor, ids), whole) > BOUNDS[8]


def test_prompts_of_another_precision_are_not_found() -> None:
    salts = {_mlx("llama", bits).kv.prefix.root for bits in (None, 8, 4)}
    assert len(salts) == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_pools_on_the_device_are_written_in_place_and_hold_what_host_ones_do(bits: int) -> None:
    """MLX's own storage: decode rows in buckets, chunks and slices out of QuantizedPool."""
    from ferrum_mlx.backends.mlx import zoo
    from ferrum_mlx.backends.mlx.executor import MLXExecutor
    from ferrum_mlx.config import EngineConfig

    config = EngineConfig(numerics="exact", block_size=4, max_model_len=400, kv_bits=bits)
    executor = MLXExecutor(zoo.build("llama"), zoo.info("llama"), config, host=False, free_memory=2**30)
    executor.prepare_startup()
    pool = executor._packed.storages[0].keys  # type: ignore[attr-defined]
    assert isinstance(pool, QuantizedPool)
    ids = pairs.prompt(40)
    host = _mlx("llama", bits)
    ours = paged(executor, ids)
    assert apart(ours, paged(host, ids)) < TURNED * apart(ours, host.forward(ids, exact_kv=True))
    assert executor.memory().kv_bytes_per_token == host.memory().kv_bytes_per_token
