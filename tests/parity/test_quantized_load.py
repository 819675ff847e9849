"""Quantized KV does not blunt the check at load: faults that its rounding would hide are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends import selfcheck
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.mlx import zoo as mlx_zoo
from ferrum_mlx.backends.mlx.adapters import AdaptedLayers
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UnsupportedModelError

from . import pairs

EXACT = "is not exact through paged attention"
MODEL = "gpt_oss"  # full layers and windows, sinks in all
Build = Callable[..., PagedExecutor]


def _mlx(name: str = MODEL, *, host: bool, **adapters: str) -> PagedExecutor:
    mx.set_default_device(mx.cpu)
    config = _config(4, adapters)
    return MLXExecutor(mlx_zoo.build(name), mlx_zoo.info(name), config, host=host, free_memory=2**30)


def _torch(name: str = MODEL, **adapters: str) -> PagedExecutor:
    from ferrum_mlx.backends.torch import zoo
    from ferrum_mlx.backends.torch.executor import TorchExecutor

    return TorchExecutor(zoo.build(name), zoo.info(name), _config(8, adapters), free_memory=2**30)


def _config(bits: int, adapters: dict[str, str]) -> EngineConfig:
    return EngineConfig(block_size=4, max_model_len=64, kv_bits=bits, adapters=tuple(adapters.items()))


BUILD: dict[str, Build] = {"mlx-host": partial(_mlx, host=True), "mlx": partial(_mlx, host=False)}
if find_spec("torch"):
    BUILD["torch"] = _torch  # takes 8 bits alone


def storages(executor: PagedExecutor) -> list[Any]:
    found: list[Any] = executor._packed.storages  # type: ignore[attr-defined]
    return found


def change(executor: PagedExecutor, name: str, value: Callable[[Any], Any]) -> None:
    """One argument of attention in one layer."""
    storage = storages(executor)[1]
    attend, on_torch = storage.attend, "softcap" in storage.attend.__annotations__

    def changed(step: Any, queries: Any, *given: Any) -> Any:
        names = ("scale", "softcap", "sinks") if on_torch else ("window", "scale", "sinks")
        how = dict(zip(names, given, strict=True))
        return attend(step, queries, *(how | {name: value(how[name])}).values())

    if on_torch and name == "window":
        storage._window = value(storage._window)
    else:
        storage.attend = changed


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a wrong window": ("window", lambda window: 6),  # of 7 tokens the last does not see the first
    "a wrong scale": ("scale", lambda scale: scale * 1.05),
    "a lost sink": ("sinks", lambda sinks: None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", BUILD)
def test_a_fault_of_one_layer_is_refused(backend: str, fault: str) -> None:
    executor = BUILD[backend]()
    change(executor, *FAULTS[fault])
    refused(executor)


def refused(executor: PagedExecutor) -> None:
    """As loaded: torch has one way to run a model; MLX has another, on which that attention is not used."""
    with pytest.raises(UnsupportedModelError, match=EXACT):
        selfcheck.check_all(executor, storages(executor))
    if isinstance(executor, MLXExecutor):
        executor.prepare_startup()
        assert executor.capabilities().off[0].startswith("many sequences in one call: all 4 layers")
    else:
        with pytest.raises(UnsupportedModelError, match=EXACT):
            executor.prepare_startup()


@pytest.mark.parametrize("backend", BUILD)
def test_the_tolerance_of_quantized_kv_alone_would_take_a_wrong_scale(backend: str) -> None:
    executor = BUILD[backend]()
    change(executor, *FAULTS["a wrong scale"])
    selfcheck.check(executor)


@pytest.mark.parametrize("backend", BUILD)
def test_an_adapter_dropped_in_one_layer_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = BUILD[backend]("llama", **pairs.adapters_of("llama"))
    selfcheck.check_all(executor, storages(executor))
    drop_in_steps(backend, "model.layers.0.self_attn.q_proj", monkeypatch)
    with pytest.raises(UnsupportedModelError, match=EXACT):
        executor.prepare_startup()


def drop_in_steps(backend: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model alone, whose rows are not counted, keeps what the adapter adds to that layer."""
    if backend == "torch":
        from ferrum_mlx.backends.torch.adapters import _Change

        added = _Change.added

        def change(self: Any, x: Any, y: Any) -> Any:
            return y if self._path == path and self._owner.count is not None else added(self, x, y)

        monkeypatch.setattr(_Change, "added", change)
        return
    true = AdaptedLayers._added

    def without(self: Any, rows: Any, at: str, pairs: Any, x: Any, y: Any) -> Any:
        return y if at == path and rows.count is not None else true(self, rows, at, pairs, x, y)

    monkeypatch.setattr(AdaptedLayers, "_added", without)


@pytest.mark.parametrize("backend", BUILD)
def test_without_a_fault_the_model_loads_and_nothing_of_the_check_is_left(backend: str) -> None:
    executor = BUILD[backend]()
    kv, pools = executor.kv, [(s.keys, s.values) for s in storages(executor)]
    executor.prepare_startup()
    assert executor.kv is kv
    assert [(s.keys, s.values) for s in storages(executor)] == pools
    assert all(hasattr(pool, "read_back") for pair in pools for pool in pair)
    assert executor.kv_capacity_snapshot().used_blocks == 0


@pytest.mark.parametrize("backend", BUILD)
def test_a_pool_that_gives_back_other_numbers_is_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of the slot before; the model's own dtype, which stands in for the pool, has none."""
    executor = BUILD[backend]()
    kind: Any = type(storages(executor)[0].keys)
    true = kind.__getitem__

    def shuffled(self: Any, where: Any) -> Any:
        name = "scales" if hasattr(self, "scales") else "_scales"
        kept = getattr(self, name)
        roll = {np.ndarray: np.roll, mx.array: mx.roll}.get(type(kept), lambda a, n, axis: a.roll(n, axis))
        setattr(self, name, roll(kept, 1, axis=0))
        try:
            return true(self, where)
        finally:
            setattr(self, name, kept)

    monkeypatch.setattr(kind, "__getitem__", shuffled)
    with pytest.raises(UnsupportedModelError, match=r"KV in int[48] does not give back what gpt_oss writes"):
        executor.prepare_startup()
