"""What a model keeps of a sequence, by its config: against the arrays that mlx-lm's own classes allocate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from ferrum_mlx import fit, memory
from ferrum_mlx.backends.mlx import zoo
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.layers import Inspection, inspect_layers
from ferrum_mlx.backends.mlx.state import StateStore
from ferrum_mlx.backends.mlx.zoo_configs import COMMON
from ferrum_mlx.backends.zoo import info, model_type
from ferrum_mlx.batch import UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.catalog import Card, HubSource, KVShape, StateShape, cards
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.hub import ModelStatus
from ferrum_mlx.kept import _ATTENTION, _RECURRENT, Kept, kept_by
from ferrum_mlx.kv.sizing import LEAST_STATES
from ferrum_mlx.plan import plan

from .tiny_models import write_folder

DTYPES = {mx.float32: 4, mx.bfloat16: 2}
Sizes = tuple[Counter[int | None], int]  # bytes a token by window, and bytes of states


def config_of(name: str) -> dict[str, Any]:
    return COMMON | zoo.EXACT[name] | {"model_type": model_type(name)}


LISTED = [name for name in zoo.EXACT if model_type(name) in {*_ATTENTION, *_RECURRENT}]
RECURRENT = [name for name in LISTED if model_type(name) in _RECURRENT]


def allocated(name: str, dtype: mx.Dtype = mx.float32) -> Sizes:
    model = zoo.build(name)
    model.set_dtype(dtype)
    return seen(inspect_layers(model, name))


def seen(inspection: Inspection) -> Sizes:
    kv: Counter[int | None] = Counter()
    for layer in inspection.kv:
        kv[layer.window] += layer.bytes_per_token
    return kv, sum(state.num_bytes for _, state in inspection.states)


def said(kept: Kept | None, number: int) -> Sizes:
    assert kept is not None
    kv: Counter[int | None] = Counter()
    for shape in kept.kv:
        kv[shape.window] += shape.num_bytes(1, number)
    return kv, sum(shape.num_bytes(number) for shape in kept.states)


@pytest.mark.parametrize("name", LISTED)
def test_a_config_says_what_mlx_lm_allocates(name: str) -> None:
    for dtype, number in DTYPES.items():
        assert said(kept_by(config_of(name)), number) == allocated(name, dtype)


def test_every_type_that_is_listed_is_checked() -> None:
    assert {model_type(name) for name in LISTED} == {*_ATTENTION, *_RECURRENT}


SIZES = {  # of the convolution, of the matrix, of heads
    "falcon_h1": ("mamba_d_conv", "mamba_d_state", "num_key_value_heads"),
    "granitemoehybrid": ("mamba_d_conv", "mamba_d_state", "num_key_value_heads"),
    "lfm2": ("conv_L_cache", "hidden_size", "num_key_value_heads"),
    "lfm2_moe": ("conv_L_cache", "hidden_size", "num_key_value_heads"),
    "mamba2": ("conv_kernel", "ssm_state_size", "num_heads"),
    "nemotron_h": ("conv_kernel", "ssm_state_size", "num_key_value_heads"),
    "olmo_hybrid": ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads"),
    "qwen3_5": ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads"),
    "qwen3_5_moe": ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads"),
    "qwen3_next": ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_every_size_counts(name: str) -> None:
    """The control: of a config with another size something else is said; without it, nothing."""
    config = config_of(name)
    text = config | config.pop("text_config", {}) | {"model_type": model_type(name)}
    right = said(kept_by(text), 4)
    for key in SIZES[model_type(name)]:
        assert said(kept_by(text | {key: text[key] + 4}), 4) != right, key
        for bad in ("x", -1, 0, 10**400, 1.5, True, [4], float("nan")):
            assert kept_by(text | {key: bad}) is None, (key, bad)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},  # its state has the dtype of a weight
        {"model_type": "deepseek_v3"},
        {"model_type": ["llama"]},
        {"model_type": None},
        {"num_hidden_layers": None},
        {"layer_types": ["sliding_attention"]},  # of one layer of four
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
    ],
)
def test_of_what_is_not_known_nothing_is_said(change: dict[str, Any]) -> None:
    assert kept_by(config_of("llama")) is not None
    assert kept_by(config_of("llama") | change) is None


# The catalogue's Qwen3.5: sizes as their config.json has them
QWEN = {
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, 16, True),
    "qwen3.5-2b": (2048, 6144, 24, 8, 2, 16, True),
    "qwen3.5-4b": (2560, 9216, 32, 16, 4, 32, True),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, 32, False),
}


@pytest.mark.parametrize("alias", QWEN)
def test_a_card_says_what_its_model_allocates(alias: str) -> None:
    """Nothing is evaluated: the weights take no memory."""
    hidden, inner, layers, heads, kv_heads, value_heads, tied = QWEN[alias]
    config = {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 256,
            "linear_num_value_heads": value_heads,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "vocab_size": 248320,
            "tie_word_embeddings": tied,
        },
    }
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    card = cards()[alias]
    assert sum(array.size for _, array in tree_flatten(model.parameters())) == card.parameters
    assert kept_by(config) == Kept(card.kv, card.states)
    assert seen(inspect_layers(model, "qwen3_5")) == said(Kept(card.kv, card.states), 2)


# What is really allocated, as a sequence runs


@cache
def executor(name: str) -> MLXExecutor:
    config = EngineConfig(numerics="exact", block_size=8, max_model_len=128, max_num_seqs=8)
    made = MLXExecutor(zoo.build(name), info(name), config, host=True, free_memory=2**26)
    made.prepare_startup()
    return made


def step(executor: MLXExecutor, cache_id: int, start: int, end: int) -> None:
    executor.reserve_kv_slots([KvSlotRequest(cache_id, end)])
    executor.prefill(UnifiedItem(cache_id=cache_id, q_tokens=(5,) * (end - start), pos_offset=start))


def store_of(executor: MLXExecutor) -> StateStore:
    store = executor.kv._copy_state.__self__  # type: ignore[union-attr]
    assert isinstance(store, StateStore)
    return store


def held(executor: MLXExecutor) -> int:
    """Bytes of the arrays in all slots, of which two may share one."""
    slots = store_of(executor)._slots.values()
    arrays = {id(a): a for batches in slots for batch in batches for a in batch.entries if a is not None}
    return sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen3_5"])
def test_a_request_holds_what_is_said_and_two_snapshots(name: str) -> None:
    running = executor(name)
    assert held(running) == 0  # the check at load has left nothing
    _, state = said(kept_by(config_of(name)), 4)
    assert running.memory().state_bytes == state > 0
    admission = running.try_admit_prefill("a", [5] * 21)
    assert isinstance(admission, Admitted)
    most = 0
    step(running, admission.cache_id, 0, 16)  # its snapshot is the state itself, until that goes on
    for start, end in ((16, 21), *((at, at + 1) for at in range(21, 40))):
        step(running, admission.cache_id, start, end)
        most = max(most, held(running))  # a snapshot that the next one stands for is given up
    assert most == LEAST_STATES * state
    running.release_cache(admission.cache_id)
    assert held(running) == (LEAST_STATES - 1) * state


def test_the_plan_says_states_apart_from_the_pool() -> None:
    running, config = executor("qwen3_5"), EngineConfig(max_model_len=128)
    needs = running.memory()
    assert needs.state_slots == 16  # one a sequence, one a snapshot
    pool = needs.kv_pool_bytes - 16 * needs.state_bytes
    assert pool == sum(storage.nbytes for storage in running._packed.storages)
    _, kv, states, _ = plan(config, running).split(" · ")
    assert kv.startswith(f"KV pool {pool / 1000:.0f} kB (")
    assert states == f"recurrent states {16 * needs.state_bytes / 1000:.1f} kB (3.6 kB a request, 16 slots)"
    _, alone, _ = plan(config, executor("mamba2")).split(" · ")
    assert alone.startswith("recurrent states ")


# In what users see

HYBRID = Card(
    alias="hybrid",
    title="Hybrid",
    licence="MIT",
    family="qwen3_5",
    context=8192,
    sources=(HubSource(repo="tiny/hybrid"),),
    parameters=1_000_000,
    kv=(KVShape(layers=1, heads=2, head_dim=64),),
    states=(StateShape(layers=3, numbers=100, float32=1000),),
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[fit.Route], None]:
    monkeypatch.setattr("ferrum_mlx.catalog.cards", lambda: {"hybrid": HYBRID})
    monkeypatch.setattr(memory, "available", lambda: 10**12)
    monkeypatch.setattr(memory, "metal_limit", lambda: None)
    return lambda route: monkeypatch.setattr(fit, "route_here", lambda backend="": route)


@pytest.mark.parametrize(("route", "number"), [("metal", 2), ("mlx-cpu", 4)])
def test_states_are_counted_whatever_the_context(route: fit.Route, number: int, on: Any) -> None:
    on(route)
    weights = 1_000_000 * number
    for context in (4096, 8192, 10**9):
        found = fit.fit_of(HYBRID, context, "mlx")
        assert found
        kv = 2 * 2 * 64 * min(context, 8192) * number
        assert found.needed_bytes == weights + kv + 3 * 3 * (100 * number + 4000) + fit.WORKSPACE
        assert "recurrent state 3 × 1" in found.why
    assert fit.catalogued_bytes(HYBRID, 4096) == 2_000_000 + 2 * 1024 * 1024 + 9 * 4200 + fit.WORKSPACE


def test_torch_refuses_a_state_before_it_reads(on: Any) -> None:
    on("packed")
    assert fit.fit_of(HYBRID, backend="torch") is None
    refused = fit.refusal(HYBRID, "torch")
    assert isinstance(refused, UnsupportedModelError)
    assert "--backend mlx" in refused.next_step
    assert fit.refusal(HYBRID, "mlx") is None


def test_a_folder_is_judged_by_its_own_config(on: Any, tmp_path: Path) -> None:
    on("metal")
    arrays = {"embed": zeros(199, 48), "w": zeros(48, 64), "v": zeros(4, 64)}
    arrays |= {f"layer{i}": zeros(4, 4) for i in range(4)}
    for name, words in (
        ("qwen3_5", "recurrent state 3 × "),
        ("mamba", "KV besides, how much is not known for"),
    ):
        folder = write_folder(tmp_path / name, config_of(name), arrays)
        status = ModelStatus(name=name, card=None, path=folder, size=None, revision="", source="")
        found = fit.fit_of(status, backend="mlx")
        assert found
        assert words in found.why
        assert ("KV of 512 tokens" in found.why) is (name == "qwen3_5")  # its own limit


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float16)
