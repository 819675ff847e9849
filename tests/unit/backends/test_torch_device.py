"""Which device and dtype are taken, and what is done otherwise where MPS lacks something.

No test here runs on MPS: they see that its route is taken, and that this route is right on the CPU.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch.adapters import AdaptedLayers
from ferrum_mlx.backends.torch.device import Device
from ferrum_mlx.backends.torch.loader import load_model
from ferrum_mlx.backends.torch.packed import PackedModel
from ferrum_mlx.backends.torch.pools import Read, _mask_of, explicit_attention
from ferrum_mlx.catalog import ResolvedModel

MPS = torch.device("mps")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(cuda=…, mps=…, macos=…): what torch finds."""

    def have(cuda: bool = False, mps: bool = False, macos: int = 15, bfloat16: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(
            torch.backends.mps, "is_macos_or_newer", lambda major, minor: (macos, 0) >= (major, minor)
        )

    return have


@pytest.mark.parametrize(
    ("found", "wanted", "place", "dtype"),
    [
        ({"cuda": True, "mps": True}, "", "cuda", torch.bfloat16),
        ({"cuda": True, "bfloat16": False}, "", "cuda", torch.float16),
        ({"mps": True}, "", "mps", torch.bfloat16),
        ({"mps": True}, "gpu", "mps", torch.bfloat16),
        ({"mps": True, "macos": 13}, "", "mps", torch.float16),
        ({"mps": True}, "cpu", "cpu", torch.float32),
        ({}, "", "cpu", torch.float32),
    ],
)
def test_device_and_dtype(
    found: dict[str, Any], wanted: str, place: str, dtype: torch.dtype, machine: Any
) -> None:
    machine(**found)
    device = devices.select(wanted)
    assert (device.place.type, device.dtype, device.host) == (place, dtype, place == "cpu")
    assert device.route.startswith(place.upper())
    assert devices.weights_dtype(device, torch.bfloat16, 1000) == (dtype, None)


def test_memory_of_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    numbers = {"recommended_max": 5000, "driver_allocated": 2000, "current_allocated": 1500}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda number=number: number)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("now"))
    assert devices.free_memory(Device("Apple GPU", MPS, torch.bfloat16)) == 3000
    assert devices.in_use(MPS, 7) == (1500, 2000)
    devices.reset_peak(MPS)
    assert len(emptied) == 2  # before each of the two sums


@pytest.mark.parametrize(("kind", "waits"), [("mps", True), ("cpu", False)])
def test_a_copy_to_mps_waits(kind: str, waits: bool) -> None:
    asked: list[bool] = []
    tensor: Any = SimpleNamespace(to=lambda device, non_blocking: asked.append(non_blocking))
    devices.send(tensor, torch.device(kind))
    assert asked == [not waits]


def test_tokens_are_chosen_on_the_cpu_instead_of_mps() -> None:
    moved: list[str] = []

    class OnMPS:
        device = MPS

        def float(self) -> Any:
            moved.append("float")
            return self

        def cpu(self) -> str:
            moved.append("cpu")
            return "logits on the CPU"

    logits: Any = OnMPS()
    assert devices.to_sample(logits) == "logits on the CPU"
    assert moved == ["float", "cpu"]
    here = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert devices.to_sample(here) is here


@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 6)])
@pytest.mark.parametrize("kind", ["causal", "masked", "whole"])
def test_attention_step_by_step_is_torchs_own(heads: int, kv_heads: int, value_dim: int, kind: str) -> None:
    """What MPS attends with: kv heads shared, values narrower than keys."""
    rng = np.random.default_rng(heads * kv_heads)
    rows, length = 5, 5 if kind == "causal" else 9
    queries, keys, values = (
        torch.from_numpy(rng.standard_normal((2, *shape), dtype=np.float32))
        for shape in ((heads, rows, 8), (kv_heads, length, 8), (kv_heads, length, value_dim))
    )
    masked = torch.zeros(2, 1, rows, length).masked_fill(torch.rand(2, 1, rows, length) < 0.3, -torch.inf)
    masked[..., 0] = 0  # every row sees something
    read = Read(0, 10, rows, slice(0, length), masked if kind == "masked" else None, kind == "causal")
    want = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=read.mask, is_causal=read.causal, scale=0.3, enable_gqa=True
    )
    got = explicit_attention(queries, [(keys, values)], _mask_of(read, queries), 0.3, None, None)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_models_on_mps_use_their_plain_attention_and_experts(
    tmp_path: Path, write_gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, place: self)
    write_gguf(tmp_path / "m.gguf")
    resolved = ResolvedModel(name="tiny", path=tmp_path / "m.gguf", format="gguf")
    there = load_model(resolved, Device("Apple GPU", MPS, torch.float32))[0]
    here = load_model(resolved, devices.select("cpu"))[0]
    assert (there.config._attn_implementation, here.config._attn_implementation) == ("eager", "sdpa")
    chosen: list[str] = []
    monkeypatch.setattr(PreTrainedModel, "device", MPS)
    monkeypatch.setattr(PreTrainedModel, "_can_set_experts_implementation", lambda self: True)
    monkeypatch.setattr(PreTrainedModel, "set_experts_implementation", lambda self, kind: chosen.append(kind))
    PackedModel(there, [], AdaptedLayers(there, []), exact=False)
    assert chosen == ["eager"]
