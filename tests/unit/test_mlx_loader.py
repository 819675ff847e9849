"""Loading into mlx-lm's classes: bit for bit the gguf package's values, the arithmetic of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from ferrum_mlx.backends.mlx.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_config import hf_config

Write = Callable[..., dict[str, np.ndarray]]
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_model(path: Path) -> ResolvedModel:
    return ResolvedModel(name="tiny", path=path, format="gguf")


def checkpoint(values: dict[str, np.ndarray], heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """The GGUF package's values under the checkpoint's names, q and k rows put back in order."""
    weights = {}
    for name, value in values.items():
        *layer, kind, _ = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        if kind in ("attn_q", "attn_k"):
            count = heads if kind == "attn_q" else kv_heads
            halves = value.reshape(count, value.shape[0] // count // 2, 2, -1)
            value = np.concatenate([halves[:, :, 0], halves[:, :, 1]], axis=1).reshape(value.shape)
        weights[f"{prefix}{HF_NAMES[kind]}.weight"] = value
    return weights


def parameters(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


@pytest.mark.parametrize(("tied", "head_dim"), [(True, 16), (False, 16), (True, 32)])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_weight_equals_the_gguf_packages(
    kind: str, tied: bool, head_dim: int, tmp_path: Path, write_gguf: Write
) -> None:
    written = write_gguf(tmp_path / "m.gguf", kind, tied=tied, head_dim=head_dim)
    expected = checkpoint(written, heads=4, kv_heads=2)
    model, config = load_model(gguf_model(tmp_path / "m.gguf"))
    loaded = parameters(model)
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value, strict=True)
    assert config["tie_word_embeddings"] is tied


def test_the_default_model_equals_the_gguf_packages(smollm2: ResolvedModel) -> None:
    import gguf

    reader = gguf.GGUFReader(smollm2.path)
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    expected = checkpoint(values, heads=9, kv_heads=3)
    loaded = parameters(load_model(smollm2)[0])
    assert set(loaded) == set(expected)
    assert [name for name in expected if not np.array_equal(loaded[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_mean_the_same_values(kind: str, tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", kind)
    plain = parameters(load_model(gguf_model(tmp_path / "m.gguf"))[0])
    model, config = load_model(gguf_model(tmp_path / "m.gguf"), quantized=True)
    bits = 8 if kind == "Q8_0" else 4
    assert config["quantization"] == {"group_size": 32, "bits": bits}
    packed = dict(tree_flatten(model.parameters()))
    for name, value in plain.items():
        layer = name.removesuffix(".weight")
        if value.ndim == 1:
            unpacked = packed[name]
        else:
            scales, biases = packed[f"{layer}.scales"], packed[f"{layer}.biases"]
            unpacked = mx.dequantize(packed[name], scales, biases, group_size=32, bits=bits)
        np.testing.assert_array_equal(np.array(unpacked), value, strict=True)
    ids = mx.array([[1, 5, 9, 11]])
    logits = load_model(gguf_model(tmp_path / "m.gguf"))[0](ids)
    np.testing.assert_allclose(np.array(model(ids)), np.array(logits), rtol=1e-3, atol=1e-2)


def test_mixed_bits_go_layer_by_layer(smollm2: ResolvedModel) -> None:
    model, _ = load_model(smollm2, quantized=True)
    assert model.model.embed_tokens.bits == 8
    assert {layer.self_attn.q_proj.bits for layer in model.model.layers} == {4}


def test_a_gguf_and_its_checkpoint_give_the_same_logits(tmp_path: Path, write_gguf: Write) -> None:
    values = write_gguf(tmp_path / "m.gguf", "F32", tied=False)
    folder = tmp_path / "folder"
    save_folder(folder, checkpoint(values, 4, 2), hf_config(GGUFFile(tmp_path / "m.gguf")))
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    ours, _ = load_model(gguf_model(tmp_path / "m.gguf"))
    theirs, config = load_model(ResolvedModel(name="f", path=folder, format="safetensors"))
    np.testing.assert_array_equal(np.array(ours(ids)), np.array(theirs(ids)))
    assert config["model_type"] == "llama"

    # the control: without the un-permutation the logits differ
    shuffled = {
        **checkpoint(values, 4, 2),
        "model.layers.0.self_attn.q_proj.weight": values["blk.0.attn_q.weight"],
    }
    save_folder(folder, shuffled, hf_config(GGUFFile(tmp_path / "m.gguf")))
    wrong, _ = load_model(ResolvedModel(name="f", path=folder, format="safetensors"))
    assert not np.allclose(np.array(ours(ids)), np.array(wrong(ids)), atol=1e-3)


def save_folder(folder: Path, weights: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors"
    )


@pytest.mark.parametrize("missing", ["blk.0.ffn_up.weight", "blk.1.attn_norm.weight", "output_norm.weight"])
def test_a_missing_tensor_is_an_error(missing: str, tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", without=missing)
    with pytest.raises(ModelFileError):
        load_model(gguf_model(tmp_path / "m.gguf"))


def test_a_tensor_too_many_is_an_error(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.block_count": 1})
    with pytest.raises(ModelFileError, match=r"no tensor 'blk\.1\."):
        load_model(gguf_model(tmp_path / "m.gguf"))


def test_a_tensor_of_the_wrong_shape_is_an_error(tmp_path: Path, write_gguf: Write) -> None:
    for changes in ({"llama.feed_forward_length": 64}, {"llama.attention.head_count_kv": 4}):
        write_gguf(tmp_path / "m.gguf", metadata=changes)
        with pytest.raises(ModelFileError):
            load_model(gguf_model(tmp_path / "m.gguf"))


@pytest.fixture
def folder(tmp_path: Path, write_gguf: Write) -> Path:
    values = write_gguf(tmp_path / "m.gguf", "F32")
    save_folder(tmp_path / "folder", checkpoint(values, 4, 2), hf_config(GGUFFile(tmp_path / "m.gguf")))
    return tmp_path / "folder"


def load_folder(path: Path) -> Any:
    return load_model(ResolvedModel(name="f", path=path, format="safetensors"))


@pytest.mark.parametrize("kind", ["olmo", "cache", "no_such_type"])
def test_a_type_that_mlx_lm_cannot_run_here(kind: str, folder: Path) -> None:
    """olmo's module ends the process where a package is not installed; cache is none of a model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(UnsupportedModelError):
        load_folder(folder)


def test_a_truncated_safetensors_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_folder(folder)


def test_a_folder_without_weights_or_config(folder: Path) -> None:
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(ModelFileError):
        load_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no model"):
        load_folder(folder)


def test_a_weight_that_is_missing_in_a_folder(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="Missing"):
        load_folder(folder)


@pytest.mark.parametrize("change", [{"model_type": "no_such_model"}, {"model_file": "evil.py"}])
def test_unknown_models_and_their_code_are_refused(change: dict[str, str], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError):
        load_folder(folder)
