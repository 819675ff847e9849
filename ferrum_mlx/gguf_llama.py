"""Llama-family GGUF files in the terms of a Hugging Face checkpoint: config, weight names, row order.

llama.cpp stores the rows of the q and k projections with the two halves of a head interleaved, for its own
form of RoPE; checkpoints (and every model class we run) keep the halves apart.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, shown
from ferrum_mlx.gguf import GGUFFile

ROPE_FREQS = "rope_freqs.weight"  # a table derived from the config, no weight of the model

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# metadata that would change the arithmetic, with the one value we compute
_MUST_BE = {
    "llama.expert_count": 0,
    "llama.attention.sliding_window": 0,
    "llama.attention.logit_softcapping": 0.0,
    "llama.rope.scale_linear": 1.0,
    "llama.logit_scale": 1.0,
    "llama.residual_scale": 1.0,
    "llama.embedding_scale": 1.0,
    "llama.attention.scale": 0.0,
}


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """A config.json-style dict of a Llama-family file, for model classes that know no GGUF.

    Raises:
        UnsupportedModelError: another architecture, or a variant that needs other arithmetic.
        ModelFileError: a size is missing or contradicts another.
    """
    _refuse_variants(gguf)
    hidden, heads = _size(gguf, "embedding_length"), _size(gguf, "attention.head_count")
    kv_heads = _size(gguf, "attention.head_count_kv", heads)
    head_dim = _size(gguf, "attention.key_length", hidden // heads)
    for key, right in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if (value := _size(gguf, key, right)) != right:
            raise UnsupportedModelError(
                f"{gguf.path}: llama.{key} is {value}", f"supported: {right}, the head size"
            )
    layers = _size(gguf, "block_count")
    vocab_size = _check_shapes(gguf, layers, hidden, heads * head_dim, kv_heads * head_dim)
    if heads % kv_heads or head_dim % 2:
        raise ModelFileError(f"{gguf.path}: {heads} heads of size {head_dim} over {kv_heads} kv heads")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _size(gguf, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _positive(gguf, "attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": _size(gguf, "context_length"),
        "rope_theta": _positive(gguf, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(gguf),
    }


def eos_token_ids(gguf: GGUFFile) -> list[int]:
    """Ids that end a generation: end of text, of turn, of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return sorted({gguf.get(key, int) for key in keys if key in gguf.metadata})


def tensors_by_weight(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    """The checkpoint's weight names, each with the GGUF tensor that holds it.

    Raises:
        ModelFileError: a tensor that no Llama model has.
    """
    names = {}
    for tensor in gguf.tensors:
        if tensor != ROPE_FREQS:
            names[_weight_name(tensor, config["num_hidden_layers"], gguf)] = tensor
    return names


def row_order(name: str, config: dict[str, Any]) -> NDArray[np.intp] | None:
    """Rows of a GGUF tensor in the checkpoint's order, [rows]; None where the order is the same."""
    if name.endswith(".attn_q.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith(".attn_k.weight"):
        heads = config["num_key_value_heads"]
    else:
        return None
    head_dim = config["head_dim"]
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _weight_name(tensor: str, num_layers: int, gguf: GGUFFile) -> str:
    stem, _, kind = tensor.rpartition(".")
    if kind == "weight" and stem in _TOP:
        return f"{_TOP[stem]}.weight"
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", stem)
    if kind == "weight" and match and match[2] in _LAYER and int(match[1]) < num_layers:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    raise ModelFileError(f"{gguf.path}: a Llama model of {num_layers} layers has no tensor {shown(tensor)}")


def _refuse_variants(gguf: GGUFFile) -> None:
    architecture = gguf.get("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{gguf.path} is of architecture {shown(architecture)}",
            "supported in GGUF: 'llama'",
            "use the model's safetensors folder or hub repository",
        )
    for key, right in _MUST_BE.items():
        if (value := gguf.metadata.get(key, right)) != right:
            raise UnsupportedModelError(f"{gguf.path}: {key} is {value}", f"supported in GGUF: {right}")


def _check_shapes(gguf: GGUFFile, layers: int, hidden: int, q_rows: int, kv_rows: int) -> int:
    """Sizes in the metadata are believed only where a tensor has them: they decide what is allocated."""
    tensors = gguf.tensors
    for name, rows in (("token_embd", None), ("blk.0.attn_q", q_rows), ("blk.0.attn_k", kv_rows)):
        tensor = tensors.get(f"{name}.weight")
        shape = tensor.shape if tensor else None
        if shape is None or shape != (rows or shape[0], hidden):
            wanted = (rows or "any", hidden)
            raise ModelFileError(f"{gguf.path}: {name}.weight has shape {shape}, the metadata says {wanted}")
    if f"blk.{layers - 1}.attn_norm.weight" not in tensors:
        raise ModelFileError(f"{gguf.path}: the metadata names {layers} layers, the last one has no tensors")
    return tensors["token_embd.weight"].shape[0]


def _size(gguf: GGUFFile, key: str, default: int | None = None) -> int:
    value = gguf.get(f"llama.{key}", int, default)
    if not 1 <= value < 2**31:
        raise ModelFileError(
            f"{gguf.path}: llama.{key} is {value}", "a whole number from 1 to 2,147,483,647 is expected"
        )
    return value


def _positive(gguf: GGUFFile, key: str, default: float | None = None) -> float:
    value = gguf.get(f"llama.{key}", float, default)
    if not (math.isfinite(value) and value > 0):
        raise ModelFileError(f"{gguf.path}: llama.{key} is {value}", "a positive number is expected")
    return value


def _rope_scaling(gguf: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    kind = gguf.get("llama.rope.scaling.type", str, "none")
    if ROPE_FREQS in gguf.tensors:
        return _llama3_scaling(gguf, head_dim)
    if kind == "linear":
        return {"rope_type": "linear", "factor": _positive(gguf, "rope.scaling.factor")}
    if kind != "none":
        raise UnsupportedModelError(
            f"{gguf.path}: RoPE scaling {shown(kind)}", "supported in GGUF: none, linear, llama3"
        )
    return None


def _llama3_scaling(gguf: GGUFFile, head_dim: int) -> dict[str, Any]:
    """The llama3 rule whose table the file stores: it keeps the factors, not the four numbers behind them."""
    stored = gguf.read(ROPE_FREQS).reshape(-1)
    rule = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    base = _positive(gguf, "rope.freq_base", 10000.0)
    turns = original / (2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    factors = 1 / ((1 - smooth) / rule["factor"] + smooth)
    if stored.shape != factors.shape or not np.allclose(stored, factors, rtol=1e-4):
        raise UnsupportedModelError(
            f"{gguf.path}: the table {ROPE_FREQS} follows no rule we know",
            "supported in GGUF: the llama3 rule",
        )
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **rule}
