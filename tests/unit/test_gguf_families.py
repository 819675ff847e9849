"""Every family's GGUF in mlx-lm's classes: as the checkpoint it was made of, with llama.cpp's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from ferrum_mlx.backends.mlx.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_weights import GGUFWeights

from . import tiny_models as tiny
from .tiny_ggufs import interleave, write_gguf

IDS = np.random.default_rng(1).integers(0, tiny.VOCAB, 40)  # more than a window, and than LongRoPE's origin


def load(path: Path, *, quantized: bool = False) -> Any:
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    return load_model(ResolvedModel(name="tiny", path=path, format=kind), quantized=quantized)[0]


def logits(model: Any) -> np.ndarray:
    found = np.array(model(mx.array(IDS)[None]))
    assert np.isfinite(found).all()
    return found


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_gguf_is_the_checkpoint_it_was_made_of(name: str, tmp_path: Path) -> None:
    mx.set_default_device(mx.cpu)
    config = tiny.CONFIGS[name]
    arrays = tiny.weights(name, config)
    write_gguf(tmp_path / "m.gguf", name, config, arrays)
    read = GGUFWeights(GGUFFile(tmp_path / "m.gguf"))
    assert set(read.names) == set(arrays)
    for weight, values in arrays.items():
        np.testing.assert_array_equal(read.read(weight), values, strict=True)
    assert_same_config(read.config, config)
    theirs = logits(load(tiny.write_folder(tmp_path / "hf", config, arrays)))
    np.testing.assert_array_equal(logits(load(tmp_path / "m.gguf")), theirs)


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name != "gemma2"])
def test_answers_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """Not Gemma 2's: mlx-lm's class knows no window, as a note says where one is passed."""
    config = tiny.CONFIGS[name]
    write_gguf(tmp_path / "m.gguf", name, config, tiny.weights(name, config))
    model = load(tmp_path / "m.gguf")
    tiny.assert_llama_cpps_answer(name, lambda ids: np.array(model(mx.array([ids]))[0]))


def assert_same_config(ours: dict[str, Any], hub: dict[str, Any]) -> None:
    left_out = {"pad_token_id", "rope_scaling", "hidden_act", "eos_token_id"}
    same = {key for key in hub if key not in left_out}
    assert {k: ours.get(k) for k in same} == {
        k: pytest.approx(hub[k]) if isinstance(hub[k], float) else hub[k] for k in same
    }
    assert ours["eos_token_id"] == [hub["eos_token_id"]]
    scaling = hub.get("rope_scaling") or {}
    found = ours["rope_scaling"] or {}
    for key, value in scaling.items():
        assert found[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert bool(found) is bool(scaling)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", "self_attn.q_proj.weight"),
        ("llama/bias", "self_attn.k_proj.bias"),
        ("gemma2", "input_layernorm.weight"),
        ("gemma3", "self_attn.q_norm.weight"),
    ],
)
def test_what_the_converter_did_matters(name: str, wrong: str, tmp_path: Path) -> None:
    """The control: a weight left as the converter stores it gives other logits."""
    config = tiny.CONFIGS[name]
    arrays = tiny.weights(name, config)
    right = logits(load(tiny.write_folder(tmp_path / "right", config, arrays)))
    weight = f"model.layers.0.{wrong}"
    heads = config["num_attention_heads" if "q_proj" in wrong else "num_key_value_heads"]
    changed = arrays[weight] + 1 if "norm" in wrong else interleave(arrays[weight], heads)
    other = tiny.write_folder(tmp_path / "wrong", config, {**arrays, weight: changed})
    assert np.abs(logits(load(other)) - right).max() > 1e-2


@pytest.mark.parametrize("name", ["llama/linear", "llama/llama3", "qwen2/yarn", "gemma3", "phi3/longrope"])
def test_scaling_matters(name: str, tmp_path: Path) -> None:
    """The control: without its scaling, RoPE gives other logits."""
    config = tiny.CONFIGS[name]
    arrays = tiny.weights(name, config)
    right = logits(load(tiny.write_folder(tmp_path / "right", config, arrays)))
    plain = {**config, "rope_scaling": None}
    assert np.abs(logits(load(tiny.write_folder(tmp_path / "plain", plain, arrays))) - right).max() > 1e-3


WIDE = {"hidden_size": 256, "intermediate_size": 256}  # a K-quant's block is 256 values


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_a_quantized_gguf_is_its_dequantized_checkpoint(kind: str, tmp_path: Path) -> None:
    """On a CPU unpacked; as on Metal, those types that are codes with scales and biases stay packed."""
    config = {**tiny.CONFIGS["llama"], **WIDE}
    found = write_gguf(tmp_path / "m.gguf", "llama", config, tiny.weights("llama", config), kind)
    folder = tiny.write_folder(tmp_path / "hf", config, found)
    model, theirs = load(tmp_path / "m.gguf"), load(folder)
    np.testing.assert_array_equal(logits(model), logits(theirs))

    packed = load(tmp_path / "m.gguf", quantized=True)
    stays = kind in ("Q8_0", "Q4_0", "Q4_1", "Q4_K")
    layer = packed.model.layers[1]
    assert hasattr(layer.mlp.down_proj, "scales") is hasattr(packed.model.embed_tokens, "scales") is stays
    if stays:
        arrays = dict(tree_flatten(packed.parameters()))
        bits = 8 if kind == "Q8_0" else 4
        for weight, values in found.items():
            if values.ndim == 2:
                start = weight.removesuffix("weight")
                parts = (arrays[start + part] for part in ("weight", "scales", "biases"))
                unpacked = mx.dequantize(*parts, group_size=32, bits=bits)
                np.testing.assert_array_equal(np.array(unpacked), values)
    np.testing.assert_allclose(logits(packed), logits(theirs), rtol=1e-3, atol=1e-2)
