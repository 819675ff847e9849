"""Packed weights on the default model: what they cost, and that the shown product is the one measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

from importlib.util import find_spec

import numpy as np

from ferrum_mlx.backends.torch.build import MEASURED, build_executor
from ferrum_mlx.backends.torch.weights import Int4Linear, Int8Linear
from ferrum_mlx.bench.weights import ALLOWED, FEW, PROSE, quality, read
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.tokenizer import load_tokenizer

TOKENS = 96


def test_the_file_s_own_numbers_at_little_cost(smollm2: ResolvedModel) -> None:
    config = EngineConfig(device="cpu", max_model_len=256)
    whole, _, _ = build_executor(smollm2, config, lambda what: None, packed=False)
    packed, _, _ = build_executor(smollm2, config, lambda what: None)
    ids = load_tokenizer(smollm2).encode(PROSE)[:TOKENS]
    reference = read(whole, ids, TOKENS)
    for rows in (FEW, TOKENS):
        found = quality(read(packed, ids, rows), reference, ids)
        assert abs(found.rise) < ALLOWED
        assert found.kl < 0.01
    assert whole.info.quantization == "none"
    assert packed.info.quantization.startswith("int4 in groups of 32 (210 layers) and int8 per channel (1 ")
    assert packed.info.quality == MEASURED
    missing = "paged kernel: numba is not installed: pip install 'ferrum-mlx[cpu]'"
    assert packed.capabilities().off == (() if find_spec("numba") else (missing,))
    assert packed.memory().parameter_bytes < 0.4 * whole.memory().parameter_bytes
    _check_first_layer(packed, smollm2)


def _check_first_layer(packed: object, smollm2: ResolvedModel) -> None:
    """Its down projection, unpacked, is the file's tensor."""
    model = packed._packed._model  # type: ignore[attr-defined]
    down = model.model.layers[0].mlp.down_proj
    assert type(down) is Int4Linear
    assert type(model.lm_head) is Int8Linear
    stored = GGUFFile(smollm2.path).read("blk.0.ffn_down.weight")
    np.testing.assert_allclose(down.weight.numpy(), stored, atol=0.01 * np.abs(stored).max())
