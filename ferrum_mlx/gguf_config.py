"""A config.json-style dict out of a GGUF's metadata, for model classes that know no GGUF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_families import family_of
from ferrum_mlx.gguf_rope import rope_scaling
from ferrum_mlx.gguf_values import Values

# metadata that would change the arithmetic, with the one value we compute
_MUST_BE = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0,
    "attention.causal": True,
    "rope.scale_linear": 1.0,
}
_PLAIN_MUST_BE = {
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The config of a file's model; every size in it is one that a tensor has.

    Raises:
        UnsupportedModelError: another architecture, or a variant that needs other arithmetic.
        ModelFileError: a size is missing or contradicts another.
    """
    family, values = family_of(gguf), Values(gguf)
    for key, right in _MUST_BE.items():
        values.must_be(key, right)
    hidden, heads = values.size("embedding_length"), values.size("attention.head_count")
    kv_heads = values.size("attention.head_count_kv", heads)
    head_dim = values.size("attention.key_length", hidden // heads)
    sizes = {"attention.value_length": head_dim}
    if not family.free_head_size:
        sizes["attention.key_length"] = hidden // heads
    if family.model_type != "phi3":  # which rotates a part of a head
        sizes["rope.dimension_count"] = head_dim
    for key, right in sizes.items():
        values.must_be(key, right)
    if heads % kv_heads or head_dim % 2:
        raise values.wrong(f"{heads} heads of size {head_dim} over {kv_heads} kv heads")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": values.size("block_count"),
        "intermediate_size": values.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": values.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(values, hidden),
        "max_position_embeddings": values.size("context_length"),
        "rope_theta": values.positive("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "eos_token_id": eos_token_ids(gguf),
    }
    for kind, key in (("bos", "bos"), ("pad", "padding")):
        token_id = gguf.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        config[f"{kind}_token_id"] = token_id if 0 <= token_id < config["vocab_size"] else None
    config |= _OWN.get(family.model_type, _plain)(values, config)
    _check_shapes(values, config)
    return config


def eos_token_ids(gguf: GGUFFile) -> list[int]:
    """Ids that end a generation: end of text, of turn, of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return sorted({gguf.get(key, int) for key in keys if gguf.has(key)})


def _plain(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    for key, right in _PLAIN_MUST_BE.items():
        values.must_be(key, right)
    return {"rope_scaling": rope_scaling(values, config["head_dim"])}


def _llama(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    tensors = values.gguf.tensors
    return {
        **_plain(values, config),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _gemma(config: dict[str, Any], largest: int) -> dict[str, Any]:
    """Of both generations. The scale of attention is in no GGUF: the largest model has one of its own."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            hidden // heads if config["num_hidden_layers"] == largest else config["head_dim"]
        ),
    }


def _gemma2(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    """Every other layer has a window, the first one too."""
    return {
        **_gemma(config, largest=46),
        "attn_logit_softcapping": values.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.positive("final_logit_softcapping", 30.0),
        "sliding_window": values.size("attention.sliding_window", 4096),
        "rope_scaling": rope_scaling(values, config["head_dim"]),
    }


def _gemma3(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    """Five layers with a window and a RoPE of their own, then one without."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values.must_be(key, 0.0)
    if values.gguf.get("gemma3.attention.sliding_window", int, 0):
        layers = {
            "sliding_window": values.size("attention.sliding_window"),
            "sliding_window_pattern": values.size("attention.sliding_window_pattern", 6),
        }
    else:
        layers = {"sliding_window_pattern": 1}
    return {
        **_gemma(config, largest=62),
        **layers,
        "rope_theta": values.positive("rope.freq_base", 1e6),
        "rope_local_base_freq": values.positive("rope.freq_base_swa", 10000.0),
        "rope_scaling": rope_scaling(values, config["head_dim"]),
    }


def _phi3(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values.must_be(key, 0.0)
    head_dim = config["head_dim"]
    rotated = values.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise values.wrong(f"phi3.rope.dimension_count is {rotated}", f"an even number up to {head_dim}")
    window = values.gguf.get("phi3.attention.sliding_window", int, 0)
    scaling = rope_scaling(values, rotated)
    original = values.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    if scaling is not None and scaling["rope_type"] != "longrope":
        raise UnsupportedModelError(
            f"{values.path}: RoPE scaling {scaling['rope_type']!r}",
            "supported in a phi3 GGUF: none, longrope",
        )
    return {
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": original,
        "sliding_window": values.size("attention.sliding_window") if window else None,
        "rope_scaling": scaling,
    }


_OWN: dict[str, Callable[[Values, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}


def _vocab_size(values: Values, hidden: int) -> int:
    tensor = values.gguf.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != hidden:
        shape = tensor.shape if tensor else None
        raise values.wrong(f"token_embd.weight has shape {shape}", f"('any', {hidden}) by the metadata")
    return tensor.shape[0]


def _check_shapes(values: Values, config: dict[str, Any]) -> None:
    """Sizes in the metadata are believed only where a tensor has them: they decide what is allocated."""
    tensors = values.gguf.tensors
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    rows = {"attn_q": q_rows, "attn_k": kv_rows}
    if config["model_type"] == "phi3":
        rows = {"attn_qkv": q_rows + 2 * kv_rows}
    for name, count in rows.items():
        tensor = tensors.get(f"blk.0.{name}.weight")
        if tensor is None or tensor.shape != (count, hidden):
            shape = tensor.shape if tensor else None
            raise values.wrong(f"blk.0.{name}.weight has shape {shape}, the metadata says {(count, hidden)}")
    layers = config["num_hidden_layers"]
    if f"blk.{layers - 1}.attn_norm.weight" not in tensors:
        raise values.wrong(f"the metadata names {layers} layers, the last one has no tensors")
