"""Every family's GGUF in transformers' classes: the logits of the checkpoint that it was made of.

transformers has a GGUF reader of its own, for fewer files: it says whether the tests' files are what
llama.cpp's converter writes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch import loader
from ferrum_mlx.backends.torch.loader import StoredGGUF, load_model
from ferrum_mlx.backends.torch.weights import pack
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_weights import GGUFWeights

from .. import tiny_models as tiny
from ..tiny_ggufs import write_gguf

IDS = torch.from_numpy(np.random.default_rng(1).integers(0, tiny.VOCAB, (1, 40)))


def resolved(path: Path) -> ResolvedModel:
    return ResolvedModel(name="tiny", path=path, format="gguf" if path.suffix else "safetensors")


def load(path: Path) -> PreTrainedModel:
    return load_model(resolved(path), devices.select("cpu"))[0]


@torch.inference_mode()
def logits(model: PreTrainedModel) -> np.ndarray:
    found = model(IDS, use_cache=False).logits.numpy()
    assert np.isfinite(found).all()
    return found


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_gguf_is_the_checkpoint_it_was_made_of(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    arrays = tiny.weights(name, config)
    write_gguf(tmp_path / "m.gguf", name, config, arrays)
    model = load(tmp_path / "m.gguf")
    loaded = {weight: value.detach().numpy() for weight, value in model.named_parameters()}
    assert set(loaded) == set(arrays)
    for weight, values in arrays.items():
        np.testing.assert_array_equal(loaded[weight], values, strict=True)
    theirs = load(tiny.write_folder(tmp_path / "hf", config, arrays))
    np.testing.assert_array_equal(logits(model), logits(theirs))
    assert model.config.rope_parameters == theirs.config.rope_parameters
    assert getattr(model.config, "layer_types", None) == getattr(theirs.config, "layer_types", None)


@pytest.mark.parametrize("copied", [False, True], ids=["kept", "copied by transformers"])
def test_layers_that_are_to_be_packed_are_read_one_at_a_time(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.CONFIGS["llama"]
    write_gguf(tmp_path / "m.gguf", "llama", config, tiny.weights("llama", config))
    device = devices.select("cpu")
    if copied:
        monkeypatch.setattr(loader, "placeholder", torch.zeros)
    unread, _ = load_model(resolved(tmp_path / "m.gguf"), device, as_stored=True)
    down = "model.layers.1.mlp.down_proj.weight"
    assert (unread.get_parameter(down).untyped_storage().nbytes() == 4) is not copied
    whole = load(tmp_path / "m.gguf")
    for model in (unread, whole):
        pack(model, StoredGGUF(GGUFWeights(GGUFFile(tmp_path / "m.gguf"))))
    np.testing.assert_array_equal(logits(unread), logits(whole))


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name != "phi3"])
def test_answers_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """Not Phi-3's: llama.cpp knows no window in it."""
    config = tiny.CONFIGS[name]
    write_gguf(tmp_path / "m.gguf", name, config, tiny.weights(name, config))
    model = load(tmp_path / "m.gguf")

    @torch.inference_mode()
    def logits(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    tiny.assert_llama_cpps_answer(name, logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    arrays = tiny.weights(name, config)
    write_gguf(tmp_path / "m.gguf", name, config, arrays)
    model = load(tiny.write_folder(tmp_path / "hf", config, arrays))
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(arrays)
    for weight, values in theirs.items():
        np.testing.assert_array_equal(values.numpy(), arrays[weight], strict=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_quantized_gguf_is_its_dequantized_checkpoint(kind: str, tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "hidden_size": 256, "intermediate_size": 256}
    found = write_gguf(tmp_path / "m.gguf", "llama", config, tiny.weights("llama", config), kind)
    folder = tiny.write_folder(tmp_path / "hf", config, found)
    np.testing.assert_array_equal(logits(load(tmp_path / "m.gguf")), logits(load(folder)))

    weight = "model.layers.1.self_attn.q_proj.weight"  # its rows were interleaved
    codes = StoredGGUF(GGUFWeights(GGUFFile(tmp_path / "m.gguf"))).codes(weight)
    assert (codes is None) is (kind == "Q6_K")
    if codes is not None:
        scales, biases = (np.repeat(np.float32(part), 32, axis=1) for part in (codes.scales, codes.biases))
        np.testing.assert_array_equal(codes.codes * scales + biases, found[weight])
    assert StoredGGUF(GGUFWeights(GGUFFile(tmp_path / "m.gguf"))).codes("no.such.weight") is None
