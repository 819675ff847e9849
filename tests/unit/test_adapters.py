"""LoRA adapters out of their folders: both forms, and everything that is refused, by name."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ferrum_mlx.adapters import base_note, check_fits, read_adapter, read_adapters
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, ModelFileError, UnsupportedModelError, UsageError

from .tiny_adapters import RANK, write_mlx_lm, write_peft

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
SIZES = {Q: (6, 5), UP: (6, 7)}
PLACES = {"model": "Model", "lm_head": (6, 9), Q: (6, 5), UP: (6, 7), "model.embed_tokens": "Embedding"}
PEFT_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def retensor(folder: Path, file: str, **changes: np.ndarray | None) -> None:
    """Other tensors in an adapter's file; None takes one away."""
    tensors = load_file(folder / file) | changes
    save_file({name: array for name, array in tensors.items() if array is not None}, folder / file)


@pytest.mark.parametrize("rslora", [False, True])
def test_both_forms_come_to_the_same(tmp_path: Path, rslora: bool) -> None:
    for want, name in (
        (write_peft(tmp_path / "p", SIZES, 1, alpha=3.0, use_rslora=rslora), "p"),
        (write_mlx_lm(tmp_path / "m", SIZES, 2, scale=7.0), "m"),
    ):
        adapter = read_adapter(name, tmp_path / name)
        check_fits(adapter, PLACES)
        assert adapter.layers.keys() == SIZES.keys()
        for path, pair in adapter.layers.items():
            np.testing.assert_allclose(pair.b @ pair.a, want[path], rtol=1e-5, atol=1e-6)


def test_sixteen_bits_are_read_exactly(tmp_path: Path) -> None:
    write_peft(tmp_path, SIZES, 1)
    tensors = load_file(tmp_path / PEFT_FILE)
    halves = {name: (array.view(np.uint32) >> 16).astype("<u2") for name, array in tensors.items()}
    save_file(halves, tmp_path / PEFT_FILE)
    data = (tmp_path / PEFT_FILE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b"U16", b"BF16")
    (tmp_path / PEFT_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    want = halves[f"base_model.model.{Q}.lora_A.weight"].astype(np.uint32) << 16
    np.testing.assert_array_equal(read_adapter("a", tmp_path).layers[Q].a, want.view(np.float32))
    save_file({name: array.astype(np.float16) for name, array in tensors.items()}, tmp_path / PEFT_FILE)
    want = tensors[f"base_model.model.{Q}.lora_A.weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(read_adapter("a", tmp_path).layers[Q].a, want)


def test_the_digest_is_the_content_s(tmp_path: Path) -> None:
    for folder, seed, alpha in (("a", 1, 2.0), ("b", 1, 2.0), ("c", 2, 2.0), ("d", 1, 3.0)):
        write_peft(tmp_path / folder, SIZES, seed, alpha)
    a, b, c, d = (each.digest for each in read_adapters([(n, str(tmp_path / n)) for n in "abcd"]))
    assert a == b
    assert len({a, c, d}) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q": 8}}, "rank_pattern is"),
        ({"alpha_pattern": {"q": 8}}, "alpha_pattern is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is [3]"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"a_switch_of_tomorrow": 1}, "a_switch_of_tomorrow is 1"),
    ],
)
def test_more_than_lora_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_peft(tmp_path, SIZES, 1, modules_to_save=None, layers_to_transform=None)
    read_adapter("a", tmp_path)
    configure(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError) as raised:
        read_adapter("a", tmp_path)
    assert said in str(raised.value)
    assert "merge the adapter" in str(raised.value)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_mlx_lm_s_other_kinds_are_refused(tmp_path: Path, kind: str) -> None:
    write_mlx_lm(tmp_path, SIZES, 1, fine_tune_type=kind)
    with pytest.raises(UnsupportedModelError, match=f"fine_tune_type is '{kind}'"):
        read_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        (write_peft, {"r": 0}, "r is 0; allowed: a whole number from 1"),
        (write_peft, {"r": 10**9}, "r is 1000000000"),
        (write_peft, {"r": RANK + 1}, "of rank 5, as adapter_config.json says"),
        (write_peft, {"lora_alpha": "2"}, "lora_alpha is '2'"),
        (write_peft, {"layers_to_transform": ["one"]}, "layers_to_transform is ['one']"),
        (write_mlx_lm, {"lora_parameters": None}, "lora_parameters is None"),
        (write_mlx_lm, {"lora_parameters": {"rank": RANK}}, "scale is None"),
        (write_mlx_lm, {"lora_parameters": {"rank": RANK, "scale": float("nan")}}, "scale is nan"),
        (write_mlx_lm, {"num_layers": "all"}, "num_layers is 'all'"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, form: Any, changes: dict[str, Any], said: str) -> None:
    form(tmp_path, SIZES, 1)
    configure(tmp_path, **changes)
    with pytest.raises(ModelFileError) as raised:
        read_adapter("a", tmp_path)
    assert said in str(raised.value)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    write_peft(tmp_path, SIZES, 1)
    (tmp_path / PEFT_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match="is a pickle, which may run a program"):
        read_adapter("a", tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no adapter_config\.json"):
        read_adapter("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFileError, match="no configuration of a LoRA adapter"):
        read_adapter("a", tmp_path)
    write_mlx_lm(tmp_path, SIZES, 1)
    (tmp_path / MLX_FILE).unlink()
    with pytest.raises(ModelFileError, match=r"has no adapters\.safetensors"):
        read_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[:-7], "is no sound safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "is no sound safetensors file"),
        (lambda data: data[:8] + b"[" * 2000 + data[2008:], "is no sound safetensors file"),
        (lambda data: b"", "is no sound safetensors file"),
        (lambda data: data[:-4] + np.float32(np.inf).tobytes(), "has values that are not finite"),
    ],
)
def test_a_file_that_is_damaged_or_hostile(tmp_path: Path, spoil: Any, said: str) -> None:
    write_peft(tmp_path, SIZES, 1)
    file = tmp_path / PEFT_FILE
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ModelFileError) as raised:
        read_adapter("a", tmp_path)
    assert said in str(raised.value)


def test_a_file_of_holes_is_refused_by_its_size(tmp_path: Path) -> None:
    """A terabyte that takes no disk: nothing of it is read, nor is memory taken for it."""
    write_peft(tmp_path, SIZES, 1)
    columns, header, at = 1 << 36, {}, 0
    for part, shape in (("A", [RANK, columns]), ("B", [columns, RANK])):
        end = at + 4 * RANK * columns
        name = f"base_model.model.{Q}.lora_{part}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(tmp_path / PEFT_FILE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"needs 2\.2 TB of memory, .* are free; take an adapter of a lower"):
        read_adapter("a", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_memory_that_ends_while_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    write_peft(tmp_path, SIZES, 1)
    monkeypatch.setattr(np, "fromfile", full)
    with pytest.raises(UsageError, match="needs more memory than is free"):
        read_adapter("a", tmp_path)


def test_values_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    paths = [f"model.layers.{layer}.mlp.up_proj" for layer in range(8)]
    write_peft(tmp_path, dict.fromkeys(paths, (100_000, 8)), 1)
    largest, kept = 4 * RANK * 100_000, 8 * 4 * RANK * (100_000 + 8)
    read_adapter("a", tmp_path)  # imports and caches are no part of it
    tracemalloc.start()
    read_adapter("a", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept < peak < kept + 3 * largest


def test_a_million_targets_take_no_longer_than_a_few(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.q_proj"
    write_peft(tmp_path, {path: (6, 5)}, 1)
    configure(tmp_path, target_modules=[*(f"x{number}" for number in range(1_000_000)), "q_proj"])
    adapter = read_adapter("a", tmp_path)
    places: dict[str, Any] = {f"model.layers.{layer}.mlp.up_proj": (6, 7) for layer in range(1, 101)}
    start = time.process_time()
    check_fits(adapter, places | {path: (6, 5)})
    assert time.process_time() - start < 2  # a hundred times a million comparisons take half a minute
    with pytest.raises(ModelFileError, match=r"should change model\.layers\.7\.self_attn\.q_proj"):
        check_fits(adapter, places | {path: (6, 5), "model.layers.7.self_attn.q_proj": (6, 5)})


def test_a_configuration_that_is_damaged(tmp_path: Path) -> None:
    write_peft(tmp_path, SIZES, 1)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"')
    with pytest.raises(ModelFileError, match="is not sound JSON"):
        read_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({f"base_model.model.{Q}.lora_B.weight": None}, ModelFileError, f"has no B for {Q}"),
        ({f"base_model.model.{Q}.lora_A.weight": None}, ModelFileError, f"has no A for {Q}"),
        ({f"base_model.model.{Q}.lora_B.bias": np.zeros(5, "f4")}, UnsupportedModelError, "lora_B.bias"),
        (
            {f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(5, "f4")},
            UnsupportedModelError,
            "lora_magnitude_vector",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 9), "f4")},
            UnsupportedModelError,
            "lora_embedding_A",
        ),
        ({"surprise": np.zeros(1, "f4")}, UnsupportedModelError, "has 'surprise'"),
        (
            {f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 6, 1), "f4")},
            UnsupportedModelError,
            "has the shape (4, 6, 1)",
        ),
        ({f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 6), "i4")}, UnsupportedModelError, "is of I32"),
    ],
)
def test_tensors_that_are_missing_or_unknown(
    tmp_path: Path, changes: dict[str, Any], error: type[FerrumError], said: str
) -> None:
    write_peft(tmp_path, SIZES, 1)
    retensor(tmp_path, PEFT_FILE, **changes)
    with pytest.raises(error) as raised:
        read_adapter("a", tmp_path)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({Q: None}, f"changes {Q}, which this model does not have"),
        ({Q: (7, 5)}, f"changes {Q} from 6 inputs to 5 outputs; the model's has 7 and 5"),
        ({Q: (6, 8)}, "the model's has 6 and 8"),
        ({Q: "SwitchLinear"}, f"changes {Q}, a SwitchLinear; allowed"),
    ],
)
def test_an_adapter_of_another_model(tmp_path: Path, places: dict[str, Any], said: str) -> None:
    write_peft(tmp_path, SIZES, 1)
    adapter = read_adapter("a", tmp_path)
    other = {path: place for path, place in (PLACES | places).items() if place is not None}
    with pytest.raises(UnsupportedModelError) as raised:
        check_fits(adapter, other)
    assert said in str(raised.value)
    assert "the adapter 'a'" in str(raised.value)


@pytest.mark.parametrize(
    ("path", "place", "said"),
    [
        ("lm_head", (6, 9), "which sees only the rows that are sampled"),
        ("model.layers.0.mlp.experts.3.up_proj", (6, 9), "an expert"),
        ("model.embed_tokens", "Embedding", "model.embed_tokens, a Embedding"),
    ],
)
def test_layers_that_no_adapter_can_change_here(tmp_path: Path, path: str, place: Any, said: str) -> None:
    write_mlx_lm(tmp_path, {path: (6, 9)}, 1)
    with pytest.raises(UnsupportedModelError) as raised:
        check_fits(read_adapter("a", tmp_path), PLACES | {path: place})
    assert said in str(raised.value)


MORE = {"model.layers.0.mlp.up_proj": (6, 7), "model.layers.1.self_attn.q_proj": (6, 5)}


@pytest.mark.parametrize(
    ("form", "settings", "missing"),
    [
        (write_peft, {}, "model.layers.0.mlp.up_proj"),
        (write_peft, {"target_modules": ["q_proj"]}, "model.layers.1.self_attn.q_proj"),
        (write_peft, {"exclude_modules": ["q_proj"]}, "model.layers.0.mlp.up_proj"),
        (write_peft, {"layers_to_transform": [1]}, "model.layers.1.self_attn.q_proj"),
        (write_peft, {"layers_to_transform": 0}, "model.layers.0.mlp.up_proj"),
        (write_peft, {"target_modules": ["0.self_attn.q_proj", UP]}, None),
        (write_peft, {"target_modules": ".*anything.*"}, None),
        (write_mlx_lm, {}, "model.layers.0.mlp.up_proj"),
        (write_mlx_lm, {"num_layers": 1}, "model.layers.1.self_attn.q_proj"),
        (
            write_mlx_lm,
            {"num_layers": 1, "lora_parameters": {"rank": RANK, "scale": 1.0, "keys": ["mlp.up_proj"]}},
            None,
        ),
    ],
)
def test_a_layer_without_its_tensors(
    tmp_path: Path, form: Any, settings: dict[str, Any], missing: str | None
) -> None:
    form(tmp_path, SIZES, 1, **settings)
    adapter = read_adapter("a", tmp_path)
    if missing is None:
        check_fits(adapter, PLACES | MORE)
        return
    with pytest.raises(ModelFileError, match=f"should change {missing}, and has no tensors"):
        check_fits(adapter, PLACES | MORE)


def test_an_adapter_that_says_it_is_for_another_model_is_told(tmp_path: Path) -> None:
    write_peft(tmp_path, SIZES, 1, base_model_name_or_path="meta/Tiny-1B")
    adapter = read_adapter("a", tmp_path)
    assert base_note(adapter, "mlx-community/tiny-1b-4bit") is None
    assert base_note(adapter, "tiny-1b-instruct.Q4_K_M.gguf") is None
    assert "made for meta/Tiny-1B; this model is tiny-1b-base" in str(base_note(adapter, "tiny-1b-base"))
    assert "made for meta/Tiny-1B; this model is other" in str(base_note(adapter, "other"))
    write_peft(tmp_path, SIZES, 1, base_model_name_or_path=None)
    assert base_note(read_adapter("a", tmp_path), "other") is None


def test_the_setting_is_checked_where_it_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    monkeypatch.setenv("HOME", folder)  # shells expand no ~ behind NAME=
    assert EngineConfig(adapters=(("a", "~"),)).adapters == (("a", folder),)
    as_dict = EngineConfig(adapters={"a": tmp_path, "b-2": folder})  # type: ignore[arg-type]
    assert as_dict.adapters == (("a", folder), ("b-2", folder))
    assert as_dict.adapter_names == ("a", "b-2")
    for given, said in (
        ([("a", folder), ("a", folder)], "two adapters are named 'a'"),
        ([("", folder)], "an adapter's name is ''"),
        ([("none", folder)], "an adapter's name is 'none'"),
        ([("a b", folder)], "an adapter's name is 'a b'"),
        ([(3, folder)], "an adapter's name is 3"),
        ([("a", f"{folder}/missing")], "there is no folder"),
        ([("a", "")], "there is no folder ''"),
        ([("a", 3)], "adapters is"),
        (7, "adapters is 7"),
        (["abc"], "adapters is ['abc']"),
    ):
        with pytest.raises(UsageError) as raised:
            EngineConfig(adapters=given)  # type: ignore[arg-type]
        assert said in str(raised.value)
