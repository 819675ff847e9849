"""Loading into transformers' classes: the gguf package's values, a checkpoint's arithmetic, clear errors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch.build import build_executor, facts
from ferrum_mlx.backends.torch.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import BackendUnavailableError, ModelFileError, UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_config import hf_config

from .. import tiny_models as tiny
from ..test_mlx_loader import checkpoint, save_folder

Write = Callable[..., dict[str, np.ndarray]]
CPU = devices.select("cpu")


def load(path: Path, kind: str = "safetensors") -> Any:
    return load_model(ResolvedModel(name="tiny", path=path, format=kind), CPU)[0]


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "tied", "head_dim"), [("F32", False, 16), ("Q4_1", True, 32), ("Q8_0", True, 16)]
)
def test_every_weight_equals_the_gguf_packages(
    kind: str, tied: bool, head_dim: int, tmp_path: Path, write_gguf: Write
) -> None:
    written = write_gguf(tmp_path / "m.gguf", kind, tied=tied, head_dim=head_dim)
    expected = checkpoint(written, heads=4, kv_heads=2)
    model = load(tmp_path / "m.gguf", "gguf")
    loaded = weights(model)
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value, strict=True)
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared is tied
    assert model.config.rope_parameters["rope_theta"] == 10000.0


@pytest.fixture
def folder(tmp_path: Path, write_gguf: Write) -> Path:
    values = write_gguf(tmp_path / "m.gguf", "F32")
    save_folder(tmp_path / "folder", checkpoint(values, 4, 2), hf_config(GGUFFile(tmp_path / "m.gguf")))
    return tmp_path / "folder"


def test_a_gguf_and_its_checkpoint_give_the_same_logits_as_mlx_lm(folder: Path) -> None:
    import mlx.core as mx

    from ferrum_mlx.backends.mlx.loader import load_model as load_mlx

    mx.set_default_device(mx.cpu)
    ids = [[3, 1, 4, 1, 5, 9, 2, 6]]
    with torch.inference_mode():
        ours = load(folder)(torch.tensor(ids)).logits.numpy()
        packed = load(folder.parent / "m.gguf", "gguf")(torch.tensor(ids)).logits.numpy()
    np.testing.assert_array_equal(ours, packed)
    model, _ = load_mlx(ResolvedModel(name="f", path=folder, format="safetensors"))
    theirs = np.array(model(mx.array(ids)))
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_folder_is_built_and_told_what_it_is(folder: Path, numerics: str) -> None:
    config = EngineConfig(device="cpu", max_model_len=64, kv_memory=1 << 20, numerics=numerics)
    said: list[str] = []
    resolved = ResolvedModel(name="tiny", path=folder, format="safetensors")
    executor, route, notes = build_executor(resolved, config, said.append)
    assert route.startswith("CPU: ")
    packed = numerics == "fast"
    assert ("packing the weights" in said) is packed
    info = executor.info
    assert (info.model_type, info.dtype, info.device) == ("llama", "float32", "cpu")
    assert (info.num_kv_heads, info.head_dim, info.vocab_size, info.max_sequence_length) == (2, 16, 96, 128)
    if packed:
        assert info.quantization.startswith("int8 per channel (")
        assert info.quality == "not measured yet: python -m ferrum_mlx.bench.weights -m tiny"
        assert executor.memory().parameter_bytes < 2 * info.num_parameters
        assert info.rounding == "bfloat16"
    else:
        assert (info.quantization, info.quality, info.rounding) == ("none", "", "float32")
        assert executor.memory().parameter_bytes == 4 * info.num_parameters
    assert notes == executor.notes == []
    executor.shutdown()
    executor.shutdown()
    assert facts("cpu")["device"] == "cpu"


def test_a_truncated_safetensors_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load(folder)


def test_a_folder_without_weights_or_config(folder: Path) -> None:
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises((ModelFileError, UnsupportedModelError)):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no model"):
        load(folder)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_weight_that_does_not_fit_is_not_filled_in_at_random(change: str, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    norm = stored.pop("model.norm.weight")
    if change == "shape":
        stored["model.norm.weight"] = norm[:-1].copy()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"norm"):
        load(folder)


def test_a_missing_tensor_of_a_gguf(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", without="blk.1.attn_norm.weight")
    with pytest.raises(ModelFileError):
        load(tmp_path / "m.gguf", "gguf")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no_such_model"},
        {
            "model_type": "no_such_model",
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        },
    ],
)
def test_unknown_models_and_their_code_are_refused(change: dict[str, Any], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_folder_packed_for_mlx_is_refused(mode: str, folder: Path, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model as load_mlx_lm
    from mlx_lm.utils import quantize_model, save_config, save_model

    mx.set_default_device(mx.cpu)
    model, config = quantize_model(*load_mlx_lm(folder), bits=4, group_size=32, mode=mode)
    save_model(tmp_path / "packed", model)
    save_config(config, tmp_path / "packed" / "config.json")
    with pytest.raises(UnsupportedModelError, match=r"packed for MLX.*--backend mlx"):
        load(tmp_path / "packed")


@pytest.mark.parametrize("name", ["llama/llama3", "gemma3"])
def test_tied_embeddings_with_the_output_matrix_in_the_file(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    assert config["tie_word_embeddings"]
    arrays = tiny.weights(name, config)
    left_out = load(tiny.write_folder(tmp_path / "left-out", config, arrays))
    twice = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    kept = load(tiny.write_folder(tmp_path / "kept", config, twice))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        np.testing.assert_array_equal(kept(ids).logits, left_out(ids).logits)
    assert kept.lm_head.weight.data_ptr() == kept.model.embed_tokens.weight.data_ptr()


def test_shards_and_an_index(folder: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        whole = load(folder)(ids).logits
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = {name: arrays[name] for name in sorted(arrays)[number::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    content = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with torch.inference_mode():
        np.testing.assert_array_equal(load(folder)(ids).logits, whole)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"names 'model-00003-of-00003\.safetensors', which is not"):
        load(folder)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="--device cpu"):
        devices.select("gpu")
    assert devices.select("").host


def test_16_bit_weights_that_would_not_fit_in_float32_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.weights_dtype(CPU, torch.bfloat16, 1000) == (torch.float32, None)
    dtype, note = devices.weights_dtype(CPU, torch.bfloat16, 10**15)
    assert dtype == torch.bfloat16
    assert note is not None
    assert "slow" in note
