"""What fits: memory for weights by route, KV by card, the refusal before weights are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrum_mlx import fit, memory, weights_size
from ferrum_mlx.catalog import Card, HubSource, KVShape, ResolvedModel, cards
from ferrum_mlx.errors import UsageError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.hub import ModelStatus
from ferrum_mlx.weights_size import AFFINE_BITS, weights_of

CARD = Card(
    alias="tiny",
    title="Tiny",
    licence="MIT",
    family="llama",
    context=8192,
    sources=(
        HubSource(repo="tiny/model"),
        HubSource(repo="tiny/q", variant="gguf", file="q.gguf", size=610_000_000),
    ),
    parameters=1_000_000_000,
    kv=(KVShape(layers=10, heads=4, head_dim=64),),
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """on(route, free): a machine that keeps weights so, with that many bytes free."""

    def machine(route: fit.Route, free: int) -> None:
        monkeypatch.setattr("ferrum_mlx.catalog.cards", lambda: {"tiny": CARD})
        monkeypatch.setattr(fit, "route_here", lambda backend="": route)
        monkeypatch.setattr(memory, "available", lambda: free)
        monkeypatch.setattr(memory, "metal_limit", lambda: None)
        monkeypatch.setattr(memory, "cuda_free", lambda: None)

    return machine


@pytest.mark.parametrize(
    ("route", "weights", "number", "numba"),
    [
        ("metal", 2e9, 2, False),
        ("packed", 2e9, 4, False),
        ("packed", 2e9, 2, True),
        ("mlx-cpu", 4e9, 4, False),
    ],
)
def test_a_card_takes_weights_kv_and_a_workspace(
    route: fit.Route, weights: float, number: int, numba: bool, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_size, "find_spec", lambda name: name if numba else None)
    kv = 2 * 10 * 4 * 64 * 1000 * number
    exactly = int(weights) + kv + fit.WORKSPACE
    free = max(exactly, 5_000_000_000 if route == "mlx-cpu" else 0)
    on(route, free)
    found = fit.fit_of(CARD, 1000)
    assert found is not None
    assert (found.needed_bytes, found.available_bytes, found.fits) == (exactly, free, True)
    assert "KV of 1,000 tokens" in found.why
    on(route, exactly - 1)
    less = fit.fit_of(CARD, 1000)
    assert less is not None
    assert less.fits is (route == "mlx-cpu")  # there the weights stay as they are stored


def test_more_context_takes_more(on: Any) -> None:
    on("metal", 10**12)
    short, long = fit.fit_of(CARD, 1000), fit.fit_of(CARD, 8000)
    assert short
    assert long
    assert long.needed_bytes - short.needed_bytes == 2 * 10 * 4 * 64 * 7000 * 2


def test_quantized_kv_takes_less(on: Any) -> None:
    on("metal", 10**12)
    plain, int8, int4 = (fit.fit_of(CARD, 8000, kv_bits=bits) for bits in (None, 8, 4))
    assert plain
    assert int8
    assert int4
    numbers = 2 * 10 * 4 * 64 * 8000  # of 2 bytes; in 8 and 4 bits with a scale and a bias for 32
    assert plain.needed_bytes - int8.needed_bytes == 2 * numbers - numbers * 36 // 32
    assert plain.needed_bytes - int4.needed_bytes == 2 * numbers - numbers * 20 // 32


def test_close_to_all_is_tight(on: Any) -> None:
    needed = 2_000_000_000 + CARD.kv_bytes(4096) + fit.WORKSPACE
    for free, tight in ((needed + 1, True), (2 * needed, False)):
        on("metal", free)
        found = fit.fit_of(CARD)
        assert found
        assert found.fits
        assert found.tight is tight


@pytest.mark.parametrize("without", ["parameters", "gpu", "card"])
def test_what_cannot_be_told_is_none(without: str, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on("gpu" if without == "gpu" else "packed", 10**12)
    monkeypatch.setattr(fit.platform, "system", lambda: "Linux")
    card = replace(CARD, parameters=None) if without == "parameters" else CARD
    monkeypatch.setattr("ferrum_mlx.catalog.cards", lambda: {"tiny": card})
    other = ModelStatus(name="o/m", card=None, path=None, size=None, revision="", source="")
    assert fit.fit_of(other if without == "card" else card) is None


def test_a_variant_that_is_named_is_the_one_that_is_judged(on: Any) -> None:
    on("metal", 10**12)
    status = ModelStatus(name="tiny:gguf", card=CARD, path=None, size=None, revision="", source="")
    named, plain = fit.fit_of(status), fit.fit_of(replace(status, name="tiny"))
    assert named
    assert plain
    weights = int(1e9 * (5 + 32 / 6) / 8) - 2_000_000_000
    assert named.needed_bytes - plain.needed_bytes == weights + CARD.kv_bytes(4096, 4) - CARD.kv_bytes(4096)


def test_ggufs_by_their_headers(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    for kind, bits in (("F32", 32), ("Q8_0", 10), ("Q4_0", 6), ("Q5_0", 32)):
        values = write_gguf(tmp_path / "m.gguf", kind)
        weights = weights_of(tmp_path / "m.gguf")
        matrices = sum(array.size for array in values.values() if array.ndim > 1)
        vectors = sum(array.size for array in values.values() if array.ndim == 1)
        assert weights.values == matrices + vectors
        assert weights.nbytes == sum(each.nbytes for each in GGUFFile(tmp_path / "m.gguf").tensors.values())
        assert weights.on_mlx == matrices * bits // 8 + 4 * vectors
        assert weights.kept("float32", 0) == weights.kept("mlx-cpu", 0) == 4 * weights.values
        table = math.prod(GGUFFile(tmp_path / "m.gguf").tensors["token_embd.weight"].shape)
        assert weights.kept("packed", 0) == int(1.125 * (weights.values - table)) + 7 * table


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_bytes_on_metal_are_those_of_the_codes(kind: str, tmp_path: Path, write_gguf: Any) -> None:
    write_gguf(tmp_path / "m.gguf", kind)
    file = GGUFFile(tmp_path / "m.gguf")
    name = "blk.0.attn_q.weight"
    stored = file.read_quantized(name)
    assert stored is not None
    groups = stored.scales.size
    assert stored.codes.size * stored.bits // 8 + 8 * groups == stored.codes.size * AFFINE_BITS[kind] // 8


def folder(path: Path, config: dict[str, Any], **tensors: np.ndarray) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_folders_by_their_headers(tmp_path: Path) -> None:
    whole = folder(tmp_path / "a", {}, w=np.zeros((8, 4), np.float16), v=np.zeros(3, np.float16))
    weights = weights_of(whole)
    assert weights.values == 35
    assert weights.nbytes == (whole / "model.safetensors").stat().st_size
    assert weights.kept("gpu", 0) == 70
    assert weights.kept("float32", 10**9) == 140
    assert weights.kept("float32", 100) == weights.nbytes  # as the loaders do


@pytest.mark.parametrize(
    ("config", "kind", "values"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, np.uint32, 8_000_000),
        ({"quantization": {"bits": 6}, "quantization_config": {"bits": 6}}, np.uint32, 5_333_333),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, np.int32, 8_000_000),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, np.int32, 4_000_000),
        ({"quantization_config": {"quant_method": "mxfp4"}}, np.uint8, 2_000_000),
        ({"quantization_config": {"quant_method": "fp8"}}, np.uint8, 1_000_000),
        ({"quantization_config": {"bits": "4"}, "quantization": None}, np.int32, 1_000_000),
        ({}, np.int32, 1_000_000),
    ],
)
def test_packed_folders_by_what_their_codes_unpack_to(
    config: dict[str, Any], kind: type, values: int, tmp_path: Path
) -> None:
    whole = {"embed": np.zeros((10, 10), np.float16)}  # is not packed, whatever the config says
    packed = folder(tmp_path / "m", config, w=np.zeros((1000, 1000), kind), **whole)
    found = weights_of(packed)
    assert found.values == values + 100
    assert found.kept("gpu", 0) == 2 * found.values
    assert weights_of(packed, CARD).values == CARD.parameters


def test_weights_without_room_are_refused_with_numbers(tmp_path: Path, write_gguf: Any) -> None:
    write_gguf(tmp_path / "m.gguf", "F32")
    model = ResolvedModel(name="tiny", path=tmp_path / "m.gguf", format="gguf", card=CARD)
    needed = weights_of(model.path).kept("packed", 0)
    fit.check_weights(model, "packed", needed)
    with pytest.raises(UsageError, match=r"tiny needs [\d.]+ kB of memory for its weights") as caught:
        fit.check_weights(model, "packed", needed - 1)
    assert "another variant (safetensors, gguf)" in caught.value.next_step


def test_a_context_is_refused_before_weights_are_read(tmp_path: Path, write_gguf: Any) -> None:
    write_gguf(tmp_path / "m.gguf", "F32")
    config = {"model_type": "llama", "text_config": {"max_position_embeddings": 128}}
    nested = folder(tmp_path / "folder", config, w=np.zeros((8, 4), np.float16))
    unsaid = folder(tmp_path / "unsaid", {}, w=np.zeros((8, 4), np.float16))
    for path, kind in ((tmp_path / "m.gguf", "gguf"), (nested, "safetensors"), (unsaid, "safetensors")):
        model = ResolvedModel(name="tiny", path=path, format=kind)
        for context in (None, 16, 128):
            fit.check_context(model, context)
        if path == unsaid:
            fit.check_context(model, 2**62)
            continue
        for context in (129, 2**62):
            with pytest.raises(UsageError, match="allowed: at most 128, tiny's own"):
                fit.check_context(model, context)


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_a_backend_refuses_before_it_reads(
    backend: str, tmp_path: Path, write_gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    from ferrum_mlx.build import _backend, build_engine
    from ferrum_mlx.config import EngineConfig

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    write_gguf(tmp_path / "m.gguf", "F32")
    model = ResolvedModel(name="m", path=tmp_path / "m.gguf", format="gguf")
    monkeypatch.setattr("ferrum_mlx.hub.resolve", lambda *_, **__: model)
    monkeypatch.setattr("ferrum_mlx.tokenizer.load_tokenizer", lambda _: None)
    monkeypatch.setattr(_backend(backend), "load_model", read)
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(UsageError, match=r"m needs .* of memory for its weights, 1\.0 kB are free"):
        build_engine(EngineConfig(model="m", backend=backend, device="cpu"))
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    with pytest.raises(AssertionError, match="weights are read"):
        build_engine(EngineConfig(model="m", backend=backend, device="cpu"))


@pytest.mark.parametrize("alias", list(cards()))
def test_every_card_says_what_it_takes(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = cards()[alias]
    monkeypatch.setattr(memory, "available", lambda: 10**12)
    monkeypatch.setattr(fit, "route_here", lambda backend="": "mlx-cpu" if card.states else "packed")
    found, longer = (fit.fit_of(card, tokens, "mlx" if card.states else "torch") for tokens in (4096, 32768))
    assert found
    assert longer
    assert card.parameters
    assert card.parameters < found.needed_bytes
    assert found.needed_bytes < longer.needed_bytes or card.context <= 4096
    on_metal = fit.catalogued_bytes(card, 4096)
    assert on_metal
    assert on_metal <= found.needed_bytes
    assert f"KV of {min(32768, card.context):,} tokens" in longer.why
