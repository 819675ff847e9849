"""Checkpoints in forms that others pack: what each backend does with them, and what is said beforehand."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING
from safetensors.numpy import save_file

from ferrum_mlx import fit, memory
from ferrum_mlx.catalog import ResolvedModel, cards
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.hub import ModelStatus
from ferrum_mlx.packing import MLX_UNPACKS, check_packing
from ferrum_mlx.weights_size import of_source, weights_of

from . import tiny_models as tiny

BACKENDS = ["mlx", *(["torch"] if find_spec("torch") else [])]
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
Arrays = dict[str, np.ndarray]


def compressed(kind: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": GROUP}}


# What a config says, and what it calls the method
METHODS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "bitsandbytes 4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes"),
    "bitsandbytes 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "by bitsandbytes"),
    "bitsandbytes old": ({"load_in_8bit": True}, "by bitsandbytes"),
    "compressed int": (compressed("pack-quantized"), "by compressed-tensors ('pack-quantized')"),
    "compressed float": (compressed("float-quantized"), "by compressed-tensors ('float-quantized')"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by FP8"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "by GPTQ"),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4"}, "by 'torchao'"),
    "no method": ({"bits": 4}, "by a method it does not name"),
    "no table": ("awq", "by AWQ"),
}


def packed(name: str, whole: np.ndarray, method: str) -> Arrays:
    """A layer's tensors in the form of that method; the numbers are of no matter."""
    outs, ins = whole.shape
    layer = name.removesuffix(".weight")
    if method == "bitsandbytes 4":
        codes, scales = np.zeros((outs * ins // 2, 1), np.uint8), np.ones(outs * ins // 64, np.float32)
        return {name: codes, f"{name}.absmax": scales, f"{name}.quant_map": np.zeros(16, np.float32)}
    if method.startswith("bitsandbytes"):
        return {name: np.zeros((outs, ins), np.int8), f"{layer}.SCB": np.ones(outs, np.float32)}
    if method == "compressed int":
        codes = np.zeros((outs, ins // 8), np.int32)
        scales = np.ones((outs, ins // 32), np.float16)
        shape = np.array([outs, ins], np.int64)
        parts = {"packed": codes, "scale": scales, "shape": shape}
        return {f"{layer}.weight_{part}": array for part, array in parts.items()}
    return {name: np.zeros((outs, ins), np.int8)}


def write(folder: Path, method: str) -> Path:
    config = {**tiny.CONFIGS["llama"], "quantization_config": METHODS[method][0]}
    arrays: Arrays = {}
    for name, whole in tiny.weights("llama", config).items():
        is_packed = name.endswith("proj.weight")
        arrays |= packed(name, whole, method) if is_packed else {name: whole.astype(np.float16)}
    return tiny.write_folder(folder, config, arrays)


def status(folder: Path) -> ModelStatus:
    return ModelStatus(name="m", card=None, path=folder, size=None, revision="", source="")


def load(backend: str, folder: Path) -> Any:
    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    loader = import_module(f"ferrum_mlx.backends.{backend}.loader")
    if backend == "mlx":
        mx.set_default_device(mx.cpu)
        return loader.load_model(resolved)[0]
    from ferrum_mlx.backends.torch import device

    return loader.load_model(resolved, device.select("cpu"))[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_loading_refuses_by_name_what_info_said_it_would(method: str, backend: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", method)
    with pytest.raises(UnsupportedModelError) as caught:
        load(backend, folder)
    assert f"is packed {METHODS[method][1]}" in caught.value.what
    assert caught.value.allowed.startswith("allowed on ")
    assert caught.value.next_step.startswith("take the model it was made of, or ")
    said = fit.refusal(status(folder), backend)
    assert str(said) == str(caught.value)
    assert fit.fit_of(status(folder), backend=backend) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_control_loads(backend: str, tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "quantization_config": None}
    folder = tiny.write_folder(tmp_path / "m", config, tiny.weights("llama", config))
    assert fit.refusal(status(folder), backend) is None
    assert fit.fit_of(status(folder), backend=backend) is not None
    load(backend, folder)


def test_awq_is_mlx_s_alone_and_in_4_bits() -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    check_packing(config, "mlx", Path("m"))
    with pytest.raises(UnsupportedModelError, match="or --backend mlx"):
        check_packing(config, "torch", Path("m"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 8}
    for backend, words in (("mlx", "AWQ in 8 bits"), ("torch", "or a GGUF of it")):
        with pytest.raises(UnsupportedModelError, match=words):
            check_packing(config, backend, Path("m"))


MARKS = {
    "compressed-tensors": ("weight_packed",),
    "fp8": ("_scale_inv", "from_fp8"),
}  # what a class looks for
THROUGH = {  # classes that leave it to another's
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral4",
    "glm_moe_dsa": "deepseek_v32",
}


@pytest.mark.parametrize("method", MARKS)
def test_types_that_unpack_are_those_whose_classes_do(method: str) -> None:
    sources = {path.stem: path.read_text() for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    does = {name for name, text in sources.items() if any(mark in text for mark in MARKS[method])}
    does |= {name for name, other in THROUGH.items() if other in does and other in sources[name]}
    assert {MODEL_REMAPPING.get(name, name) for name in MLX_UNPACKS[method]} == does


@pytest.mark.parametrize("method", MARKS)
def test_those_types_are_not_refused(method: str) -> None:
    for kind in MLX_UNPACKS[method]:
        said = compressed("pack-quantized") if method == "compressed-tensors" else {"quant_method": method}
        check_packing({"model_type": kind, "quantization_config": said}, "mlx", Path("m"))
        check_packing({"model_type": kind, "text_config": {"quantization_config": said}}, "mlx", Path("m"))
        with pytest.raises(UnsupportedModelError, match=r"take the model it was made of, or --backend mlx"):
            check_packing({"model_type": kind, "quantization_config": said}, "torch", Path("m"))


# MXFP4, which both read: values of 4 bits, times a power of two for 32 of them

HIDDEN, EXPERTS = 64, 4
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write_mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny GPT-OSS, and the same values as float32."""
    rng = np.random.default_rng(4)
    config = {
        **tiny.SIZES,
        "model_type": "gpt_oss",
        "intermediate_size": HIDDEN,
        "head_dim": 16,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "dtype": "float32",
    }

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 8).astype(np.float32)

    shared = {
        "model.embed_tokens.weight": random(tiny.VOCAB, HIDDEN),
        "lm_head.weight": random(tiny.VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    codes: Arrays = {}
    whole: Arrays = {}
    for layer in (f"model.layers.{i}." for i in range(2)):
        for part, outs in (("q", 64), ("k", 32), ("v", 32), ("o", HIDDEN)):
            shared[f"{layer}self_attn.{part}_proj.weight"] = random(outs, HIDDEN)
            shared[f"{layer}self_attn.{part}_proj.bias"] = random(outs)
        shared[f"{layer}self_attn.sinks"] = random(4)
        shared[f"{layer}mlp.router.weight"], shared[f"{layer}mlp.router.bias"] = (
            random(EXPERTS, HIDDEN),
            random(EXPERTS),
        )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{layer}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for part, outs in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
            name = f"{layer}mlp.experts.{part}"
            blocks = rng.integers(0, 256, (EXPERTS, outs, HIDDEN // 32, 16), dtype=np.uint8)
            scales = rng.integers(120, 124, blocks.shape[:-1], dtype=np.uint8)
            shared[f"{name}_bias"] = random(EXPERTS, outs)
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
            values = pairs * np.exp2(scales.astype(np.float32) - 127)[..., None]
            whole[name] = values.reshape(EXPERTS, outs, HIDDEN).swapaxes(1, 2)  # as transformers keeps them
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    return (
        tiny.write_folder(tmp_path / "packed", config | said, shared | codes),
        tiny.write_folder(tmp_path / "whole", config, shared | whole),
    )


def test_mxfp4_is_unpacked_exactly_on_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder, whole = write_mxfp4(tmp_path)
    model, expected = load("torch", folder), load("torch", whole)
    for (name, ours), (other, theirs) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    weights = weights_of(folder)
    assert weights.kept("float32", 10**12) >= 4 * sum(p.numel() for p in model.parameters())
    assert weights.on_torch >= 2 * sum(p.numel() for p in model.parameters())  # without room for float32
    assert weights.nbytes < weights.on_torch  # what a file of codes takes
    mlx = load("mlx", folder)
    ids = [[5, 9, 2, 17, 44, 3]]
    with torch.inference_mode():
        ours = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.array(mlx(mx.array(ids))), ours, atol=1e-4 * np.abs(ours).max())
    held = sum(array.nbytes for _, array in tree_flatten(mlx.parameters()))
    assert held <= weights.kept("metal", 0) == weights.nbytes <= held + 8192  # the header besides


def test_experts_stay_float32_where_torch_packs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ferrum_mlx.backends.torch.build import load as load_packed
    from ferrum_mlx.config import EngineConfig

    folder, _ = write_mxfp4(tmp_path)
    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    config = EngineConfig(device="cpu", max_model_len=64, kv_memory=1 << 20)
    executor, _ = load_packed(resolved, config, lambda _: None).executor(config, lambda _: None, 1 << 30)
    held = executor.memory().parameter_bytes
    weights = weights_of(folder)
    assert weights.nbytes < held <= weights.kept("packed", 0) < 4 * weights.values + 8192
    experts = 2 * EXPERTS * 3 * HIDDEN * HIDDEN
    assert held > 4 * experts
    card = cards()["gpt-oss-20b"]
    assert card.parameters
    assert card.experts == 24 * 32 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)  # layers, experts, matrices
    source = of_source(card, card.sources[0])
    assert source
    assert source.kept("packed", 0) == 2 * card.parameters + 2 * card.experts


@pytest.mark.parametrize("scale", ["", "ue8m0"])
def test_fp8_that_mlx_lm_unpacks_takes_16_bits(scale: str, tmp_path: Path) -> None:
    said = {"quant_method": "fp8", "scale_fmt": scale, "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "ministral3", "quantization_config": said})
    )
    save_file({"w": np.zeros((64, 64), np.uint8)}, tmp_path / "model.safetensors")
    weights = weights_of(tmp_path)
    assert weights.values == 64 * 64
    assert weights.kept("metal", 0) == (weights.nbytes if scale else 2 * 64 * 64)


def test_a_float32_folder_has_float32_kv_on_metal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "route_here", lambda backend="": "metal")
    monkeypatch.setattr(memory, "available", lambda: 10**10)
    config = tiny.CONFIGS["llama"]
    arrays = tiny.weights("llama", config)
    needed = {}
    for kind in (np.float32, np.float16):
        folder = tiny.write_folder(
            tmp_path / kind.__name__, config, {n: a.astype(kind) for n, a in arrays.items()}
        )
        found = fit.fit_of(status(folder), backend="mlx")
        assert found
        needed[kind] = found.needed_bytes - weights_of(folder).nbytes - fit.WORKSPACE
    assert needed[np.float16] == 2 * 2 * tiny.KV_HEADS * 16 * tiny.LENGTH * 2
    assert needed[np.float32] == 2 * needed[np.float16]
