"""Checkpoints packed for MLX, and by AWQ and GPTQ: mlx-lm reads them, each layer as its config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_mlx_lm
from mlx_lm.utils import quantize_model, save_config, save_model
from safetensors.numpy import load_file, save_file

from ferrum_mlx.backends.mlx.build import quantization_of
from ferrum_mlx.backends.mlx.device import to_float32
from ferrum_mlx.backends.mlx.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError

from . import tiny_models as tiny

CONFIG = {**tiny.CONFIGS["qwen3"], "tie_word_embeddings": False}
IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    mx.set_default_device(mx.cpu)
    return tiny.write_folder(tmp_path / "plain", CONFIG, tiny.weights("qwen3", CONFIG))


def pack(plain: Path, folder: Path, predicate: Any = None, **settings: Any) -> Path:
    """As `mlx_lm.convert -q` writes it."""
    model, config = load_mlx_lm(plain)
    model, config = quantize_model(model, config, quant_predicate=predicate, **settings)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def load(folder: Path) -> nn.Module:
    return load_model(ResolvedModel(name="tiny", path=folder, format="safetensors"))[0]


def assert_the_same_once_unpacked(model: nn.Module, logits: mx.array) -> None:
    """The CPU route unpacks every layer: its products are those of the packed layers."""
    assert to_float32(model) is None
    assert not any(hasattr(module, "bits") for module in model.modules())
    np.testing.assert_allclose(np.array(model(IDS)), np.array(logits), atol=2e-3)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "words"),
    [
        ("affine", 4, 32, "4-bit, groups of 32"),
        ("affine", 6, 64, "6-bit, groups of 64"),
        ("mxfp4", 4, 32, "4-bit mxfp4, groups of 32"),
        ("nvfp4", 4, 16, "4-bit nvfp4, groups of 16"),
        ("mxfp8", 8, 32, "8-bit mxfp8, groups of 32"),
    ],
)
def test_every_mode_of_mlx(
    mode: str, bits: int, group_size: int, words: str, plain: Path, tmp_path: Path
) -> None:
    config = {**CONFIG, "intermediate_size": 128}  # a multiple of every group
    tiny.write_folder(plain, config, tiny.weights("qwen3", config))
    folder = pack(plain, tmp_path / "packed", bits=bits, group_size=group_size, mode=mode)
    theirs, _ = load_mlx_lm(folder)
    ours = load(folder)
    expected = dict(tree_flatten(theirs.parameters()))
    found = dict(tree_flatten(ours.parameters()))
    assert set(found) == set(expected)
    assert all(mx.array_equal(found[name], expected[name], equal_nan=True) for name in expected)
    assert quantization_of(ours).startswith(words)
    logits = ours(IDS)
    whole = np.array(load(plain)(IDS))
    assert np.abs(np.array(logits) - whole).max() > 1e-3  # the control: packing costs something
    assert_the_same_once_unpacked(ours, logits)


def test_overrides_of_single_layers(plain: Path, tmp_path: Path) -> None:
    """Mixed bits as mlx_lm's recipes write them: each layer has its own, some stay whole."""
    wanted: dict[str, Any] = {
        "model.embed_tokens": {"group_size": 64, "bits": 8},
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 3},
        "model.layers.1.self_attn.v_proj": {"group_size": 32, "bits": 6},
        "model.layers.1.self_attn.q_proj": False,
        "lm_head": False,
    }
    folder = pack(plain, tmp_path / "packed", lambda path, _: wanted.get(path, True), bits=4, group_size=32)
    written = json.loads((folder / "config.json").read_text())["quantization"]
    assert written["model.layers.0.mlp.down_proj"]["bits"] == 3
    model = load(folder)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding | nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        said = wanted.get(path, {"group_size": 32, "bits": 4})
        assert hasattr(module, "bits") is bool(said), path
        if said:
            assert (module.bits, module.group_size) == (said["bits"], said["group_size"]), path
    words = quantization_of(model)
    assert words.startswith("4-bit, groups of 32 (11 layers) and unpacked (2 layers) and ")
    assert "3-bit, groups of 32 (1 layers)" in words
    assert_the_same_once_unpacked(model, model(IDS))


def test_overrides_that_do_not_fit_the_weights_are_an_error(plain: Path, tmp_path: Path) -> None:
    folder = pack(plain, tmp_path / "packed", bits=4, group_size=32)
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config[key]["model.layers.0.mlp.down_proj"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="down_proj"):
        load(folder)


def write_awq(tmp_path: Path) -> tuple[Path, Path]:
    """4-bit codes, (code - zero) · scale; and a folder of the same values as float32."""
    mx.set_default_device(mx.cpu)
    size, group = 128, 64
    plain = {**tiny.CONFIGS["llama"], "hidden_size": size, "intermediate_size": size}
    config = {**plain, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": group}}
    rng = np.random.default_rng(2)
    stored, whole = {}, {}
    for name, value in tiny.weights("llama", config).items():
        if not name.endswith("proj.weight"):
            stored[name] = whole[name] = value
            continue
        outs, ins = value.shape
        codes, zeros = rng.integers(0, 16, (ins, outs)), rng.integers(0, 16, (ins // group, outs))
        scales = (rng.integers(1, 64, (ins // group, outs)) / 1024).astype(np.float32)
        values = (codes - np.repeat(zeros, group, axis=0)) * np.repeat(scales, group, axis=0)
        whole[name] = values.T.astype(np.float32)
        start = name.removesuffix("weight")
        stored |= {f"{start}qweight": awq_packed(codes), f"{start}qzeros": awq_packed(zeros)}
        stored[f"{start}scales"] = scales
    return (
        tiny.write_folder(tmp_path / "packed", config, stored),
        tiny.write_folder(tmp_path / "whole", plain, whole),
    )


def awq_packed(codes: np.ndarray) -> np.ndarray:
    """Eight outputs in an int32, in AWQ's order."""
    eights = codes.reshape(codes.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
    return (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2, dtype=np.uint32).view(np.int32)


def test_awq(tmp_path: Path) -> None:
    packed, whole = write_awq(tmp_path)
    model = load(packed)
    assert quantization_of(model).startswith("4-bit, groups of 64 (14 layers)")
    np.testing.assert_allclose(np.array(model(IDS)), np.array(load(whole)(IDS)), atol=2e-3)


@pytest.mark.parametrize("change", ["g_idx", "rows"])
def test_gptq_is_refused_by_name(change: str, tmp_path: Path) -> None:
    """mlx-lm takes it for AWQ, whose codes lie the other way round."""
    folder, _ = write_awq(tmp_path)
    arrays = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    for name in [name for name in arrays if name.endswith("qweight")]:
        if change == "g_idx":
            arrays[name.replace("qweight", "g_idx")] = np.arange(128, dtype=np.int32) // 64
        else:
            arrays[name] = np.ascontiguousarray(arrays[name].T)
    tiny.write_folder(folder, config, arrays)
    with pytest.raises(UnsupportedModelError, match="GPTQ"):
        load(folder)


def test_shards_and_an_index(tmp_path: Path) -> None:
    mx.set_default_device(mx.cpu)
    config = tiny.CONFIGS["llama"]
    arrays = tiny.weights("llama", config)
    whole = np.array(load(tiny.write_folder(tmp_path / "whole", config, arrays))(IDS))
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(arrays)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: arrays[name] for name in names[number::3]}, folder / file)
        index |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    np.testing.assert_array_equal(np.array(load(folder)(IDS)), whole)

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelFileError, match=r"names 'model-00002-of-00003\.safetensors', which is not there"
    ):
        load(folder)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_tied_embeddings_with_the_output_matrix_in_the_file(name: str, tmp_path: Path) -> None:
    mx.set_default_device(mx.cpu)
    config = tiny.CONFIGS[name]
    assert config["tie_word_embeddings"]
    arrays = tiny.weights(name, config)
    left_out = load(tiny.write_folder(tmp_path / "left-out", config, arrays))
    twice = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    kept = load(tiny.write_folder(tmp_path / "kept", config, twice))
    np.testing.assert_array_equal(np.array(kept(IDS)), np.array(left_out(IDS)))
