"""Which form a GGUF's weights take on which device, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from ferrum_mlx.backends.mlx import build
from ferrum_mlx.backends.mlx.build import Loaded, load
from ferrum_mlx.backends.mlx.device import Device
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig

from . import tiny_models as tiny
from .tiny_ggufs import write_gguf


def loaded(path: Path, name: str, kind: str = "F32", **changes: Any) -> Loaded:
    config = {**tiny.CONFIGS[name], **changes}
    write_gguf(path / "m.gguf", name, config, tiny.weights(name, config), kind)
    resolved = ResolvedModel(name="tiny", path=path / "m.gguf", format="gguf")
    return load(resolved, EngineConfig(), lambda _: None)


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as loading can tell; the arrays stay on the CPU."""
    mx.set_default_device(mx.cpu)
    monkeypatch.setattr(build.devices, "select", lambda _: Device("Apple GPU", host=False))
    monkeypatch.setattr(build.devices, "free_memory", lambda _: 1 << 30)


def test_on_a_cpu_a_gguf_is_unpacked(tmp_path: Path) -> None:
    found = loaded(tmp_path, "llama", "Q4_0")
    assert found.info.quantization == "none"
    assert found.notes == ()
    assert not any(isinstance(module, nn.QuantizedLinear) for module in found.model.modules())


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Q4_0", "4-bit, groups of 32 (16 layers)"),
        ("Q8_0", "8-bit, groups of 32 (16 layers)"),
        ("Q4_K", "4-bit, groups of 32 (16 layers)"),
        ("Q6_K", "none"),
        ("F16", "none"),
    ],
)
def test_on_metal_it_stays_packed_where_it_can(kind: str, words: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256}  # a K-quant's block is 256 values
    found = loaded(tmp_path, "llama", kind, **wide)
    assert found.info.quantization == words
    said = [note for note in found.notes if f"the file's {kind} weights are in float32 here: 0.00 GB" in note]
    assert bool(said) is (words == "none")


@pytest.mark.parametrize(("name", "said"), [("gemma2", True), ("phi3", True), ("gemma3", False)])
def test_a_window_that_mlx_lm_leaves_out_is_said(name: str, said: bool, tmp_path: Path) -> None:
    notes = loaded(tmp_path, name).notes
    assert any("no sliding window: past 8 tokens" in note for note in notes) is said


def test_a_window_as_long_as_the_context_is_not_said(tmp_path: Path) -> None:
    assert loaded(tmp_path, "phi3", sliding_window=tiny.LENGTH).notes == ()
