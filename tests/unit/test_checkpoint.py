"""A checkpoint folder that lies: one clear error before anything is allocated, on both backends."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrum_mlx import checkpoint
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import FerrumError, ModelFileError, UnsupportedModelError
from ferrum_mlx.files import inside
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.tokenizer import load_tokenizer

SHAPES = {"a": (96, 64), "b": (64,), "c": (64, 96), "d": (96, 64)}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 96,
    "rope_theta": 1e6,
    "sliding_window": None,
    "eos_token_id": [1, 2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


def test_a_sound_folder(folder: Path) -> None:
    assert checkpoint.check_folder(folder) == SHAPES


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 10**12, "hidden_size is 1000000000000"),
        ("hidden_size", -64, "-64"),
        ("hidden_size", 65, "no tensor of the weights has it"),
        ("hidden_size", "64", "'64'; a whole number"),
        ("hidden_size", 64.0, "64.0; a whole number"),
        ("hidden_size", float("nan"), "nan"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", 10**6, "the weights are 4 tensors"),
        ("num_attention_heads", 2_000, "largest dimension of the weights is 96"),
        ("vocab_size", 10**7, "largest dimension"),
        ("vocab_size", "x" * 5000, "vocab_size is 'xxx"),
        ("intermediate_size", 10**12, "0 to 2,147,483,647"),
        ("max_position_embeddings", 1e300, "max_position_embeddings"),
        ("max_position_embeddings", 4096.0, "a whole number"),
        ("max_position_embeddings", "big", "'big'; a whole number"),
        ("max_position_embeddings", True, "True; a whole number"),
        ("num_attention_heads", 0, "num_attention_heads is 0; at least 1"),
        ("num_key_value_heads", -1, "num_key_value_heads is -1; at least 1"),
        ("rope_theta", float("inf"), "rope_theta is inf; a finite number"),
        ("rope_theta", float("nan"), "rope_theta is nan; a finite number"),
        ("attention_dropout", float("nan"), "nan; a finite number"),
        ("text_config", [1], "text_config is [1]; a config"),
        ("text_config", "x", "text_config is 'x'; a config"),
        ("num_experts", 10**5, "num_experts"),
        ("text_config", {"hidden_size": 10**12}, "hidden_size"),
        ("text_config", {"num_hidden_layers": 5}, "5"),
        ("model_type", None, "no model_type"),
    ],
)
def test_sizes_that_cannot_be(key: str, value: Any, said: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    with pytest.raises(ModelFileError) as caught:
        checkpoint.check_folder(folder)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '"x"', "\xff", "[" * 10**6, '{"a":' * 10**5, "{" + " " * 100, '{"a": 1}}'],
)
def test_json_that_is_none(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        checkpoint.check_folder(folder)


def test_configs_in_configs(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 500 + "1" + "}" * 500)
    with pytest.raises(ModelFileError):
        checkpoint.check_folder(folder)
    nested = json.loads('{"a":' * 50 + "1" + "}" * 50)
    (folder / "config.json").write_text(json.dumps(CONFIG | nested))
    with pytest.raises(ModelFileError, match="nested too deep"):
        checkpoint.check_folder(folder)


def test_json_larger_than_any_real_one(folder: Path) -> None:
    with open(folder / "config.json", "ab") as file:
        file.truncate(10**12)  # sparse: takes no disk
    with pytest.raises(ModelFileError, match="1000000000000 bytes; at most"):
        checkpoint.check_folder(folder)


HEADER = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def changed(**entry: Any) -> dict[str, Any]:
    return {"a": HEADER["a"] | entry}


@pytest.mark.parametrize(
    "header",
    [
        changed(data_offsets=[0, 2**63]),
        changed(data_offsets=[16, 0]),
        changed(data_offsets=[4, 20]),
        changed(shape=[2**40, 2**40]),
        changed(shape=[-1, 2]),
        changed(shape=[2, 3]),
        changed(dtype="F33"),
        changed(dtype=7),
        {**HEADER, "b": HEADER["a"]},  # the same bytes twice
        {**HEADER, "b": HEADER["a"] | {"data_offsets": [8, 24]}},
        {"a": []},
        [],
    ],
)
def test_a_safetensors_header_that_lies(header: Any, folder: Path) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(ModelFileError, match=r"model\.safetensors is no sound"):
        checkpoint.check_folder(folder)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_safetensors_header_of_absurd_length(length: int, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" * 50)
    with pytest.raises(ModelFileError, match="no sound safetensors"):
        checkpoint.check_folder(folder)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"a": "model.safetensors", "b": "model-2.safetensors"}, "'model-2.safetensors', which is not there"),
        ({"a": "../model.safetensors"}, "no name of a file"),
        ({"a": "x" * 5000}, "no name of a file"),
        ({"a": 7}, "maps no weights"),
        (["a"], "maps no weights"),
        (None, "maps no weights"),
    ],
)
def test_an_index_that_lies(names: Any, said: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelFileError, match=said):
        checkpoint.check_folder(folder)


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/x", "", "a\0", "a\\b", "\ud800" * 300])
def test_names_that_lead_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no name of a file"):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["x", "a/b", "..x", "x..y", "a b", "é"])
def test_names_that_do_not(name: str, tmp_path: Path) -> None:
    assert inside(tmp_path, name) == tmp_path / name


def test_scale() -> None:
    checkpoint.check_scale(2 * 10**9, {"a": (10**9,)}, Path("m"))
    with pytest.raises(ModelFileError, match="describes 3,000,000,000 values, the weights are 1,000,000,000"):
        checkpoint.check_scale(3 * 10**9, {"a": (10**9,)}, Path("m"))


def load(backend: str, resolved: ResolvedModel) -> object:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    if backend == "mlx":
        from ferrum_mlx.backends.mlx.loader import load_model

        return load_model(resolved)
    from ferrum_mlx.backends.torch import device
    from ferrum_mlx.backends.torch.loader import load_model as load_on_torch

    return load_on_torch(resolved, device.select("cpu"))


@pytest.mark.parametrize("backend", ["mlx", "torch"])
@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
        {"model_file": "evil.py"},
        {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "model_type": "evil"},
    ],
)
def test_code_in_a_folder_is_never_run(settings: dict[str, Any], backend: str, folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps(CONFIG | settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Evil"}))
    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model code|not supported|not recognize"):
        load(backend, resolved)
    with pytest.raises(FerrumError):
        load_tokenizer(resolved)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_a_gguf_of_more_layers_than_tensors(
    backend: str, tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    last = {"blk.999999.attn_norm.weight": np.zeros(64, np.float32)}
    write_gguf(tmp_path / "m.gguf", metadata={"llama.block_count": 10**6}, extra=last)
    with pytest.raises(ModelFileError, match=r"num_hidden_layers is 1000000; the weights are \d+ tensors"):
        load(backend, ResolvedModel(name="m", path=tmp_path / "m.gguf", format="gguf"))


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_a_gguf_whose_layers_are_too_wide(
    backend: str, tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.feed_forward_length": 2**30})
    with pytest.raises(ModelFileError, match=r"does not fit|the config describes"):
        load(backend, ResolvedModel(name="m", path=tmp_path / "m.gguf", format="gguf"))


def test_a_gguf_in_parts(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        GGUFFile(tmp_path / "m.gguf")


def test_configs_of_all_model_types_are_believed() -> None:
    """mlx-lm's tiny ones, each with the shapes of its own weights."""
    pytest.importorskip("mlx")
    from mlx.utils import tree_flatten

    from ferrum_mlx.backends.mlx import zoo

    for name in zoo.EXACT:
        model = zoo.build(name)
        args = getattr(model, "args", None) or model.config
        shapes = {path: tuple(array.shape) for path, array in tree_flatten(model.parameters())}
        checkpoint.check_sizes(dict(vars(args)), shapes, Path(name))


def test_configs_of_all_torch_model_types_are_believed() -> None:
    pytest.importorskip("torch")
    from ferrum_mlx.backends.torch import zoo

    for name in (*zoo.EXACT, *zoo.BOUNDED):
        model = zoo.build(name)
        shapes = {path: tuple(array.shape) for path, array in model.state_dict().items()}
        checkpoint.check_sizes(model.config.to_dict(), shapes, Path(name))
        parts = (model.parameters(), model.buffers())
        checkpoint.check_scale(sum(part.numel() for some in parts for part in some), shapes, Path(name))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library would say that there is no such file."""
    monkeypatch.setattr(checkpoint.os, "access", lambda path, _: path.name != name)
    with pytest.raises(ModelFileError, match=f"{name} cannot be read: permission denied; check its perm"):
        checkpoint.check_folder(folder)
    monkeypatch.undo()
    checkpoint.check_folder(folder)
