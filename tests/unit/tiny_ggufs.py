"""The GGUF that llama.cpp's converter makes of a tiny model, in words of this file, none of the reader's."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

from .tiny_models import Arrays, Config, family, head_dim

# what a module of a layer is called in a GGUF; norms differ between families
_COMMON = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    name: str,
    config: Config,
    arrays: Arrays,
    kind: str = "F32",
    changes: dict[str, float] | None = None,
) -> Arrays:
    """What the converter writes.

    Args:
        kind: the type of matrices.
        changes: metadata that is otherwise in this file, without the architecture in front.

    Returns:
        The weights by the checkpoint's names, as a reader of such a file must find them.
    """
    writer = gguf.GGUFWriter(path, family(name))
    _write_metadata(writer, name, config)
    for key, value in (changes or {}).items():
        full = f"{family(name)}.{key}"
        writer.kv_data[0].pop(full, None)
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(full, value)
    number = gguf.GGMLQuantizationType[kind]
    found: Arrays = {}
    for weight, values in arrays.items():
        stored = values
        module, _, suffix = weight.rpartition(".")
        if name.startswith("gemma") and module.endswith("norm"):
            stored = stored + np.float32(1)
        heads = _interleaved_heads(name, module, config)
        if heads:
            stored = interleave(stored, heads)
        if values.ndim == 1:
            writer.add_tensor(f"{gguf_name(name, module)}.{suffix}", stored)
            found[weight] = values
            continue
        packed = packed_bytes(stored, number)
        writer.add_tensor(f"{gguf_name(name, module)}.{suffix}", packed, raw_dtype=number)
        stored = gguf.dequantize(packed, number).astype(np.float32).reshape(values.shape)
        found[weight] = halves_apart(stored, heads) if heads else stored
    for table, factors in _tables(config).items():
        writer.add_tensor(table, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def gguf_name(name: str, module: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in top:
        return top[module]
    _, _, layer, rest = module.split(".", 3)
    norms = _FOUR_NORMS if name.startswith("gemma") else _TWO_NORMS
    return f"blk.{layer}.{(_COMMON | norms)[rest]}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head 0 1 2 3 | 4 5 6 7 as 0 4 1 5 2 6 3 7."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(values.shape)


def halves_apart(values: np.ndarray, heads: int) -> np.ndarray:
    rows = values.reshape(heads, -1, *values.shape[1:])
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(values.shape)


def packed_bytes(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The package packs the simple types only; of the others, random blocks with sensible scales."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(values.size).integers(
            0, 256, (values.size // per_block, nbytes), dtype=np.uint8
        )
        for at in _SCALES_AT[kind.name]:
            blocks[:, at : at + 2] = np.array([2**-12], np.float16).view(np.uint8)
        return blocks.reshape(values.shape[0], -1)


_SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _interleaved_heads(name: str, module: str, config: Config) -> int:
    if family(name) != "llama":
        return 0
    kinds = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = kinds.get(module.rpartition(".")[2])
    return config[kind] if kind else 0


def _write_metadata(writer: gguf.GGUFWriter, name: str, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family(name) in ("llama", "phi3"):
        part = config.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(part * head_dim(config)))
    if family(name) == "llama":
        writer.add_vocab_size(config["vocab_size"])
    if family(name) == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if name.startswith(("gemma", "phi3")):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _write_rope(writer, config)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _write_rope(writer: gguf.GGUFWriter, config: Config) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _tables(config: Config) -> Arrays:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "longrope":
        kinds = {"long": "long_factor", "short": "short_factor"}
        return {f"rope_factors_{k}.weight": np.float32(scaling[v]) for k, v in kinds.items()}
    if scaling.get("rope_type") != "llama3":
        return {}
    factors = []
    for i in range(0, head_dim(config), 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / head_dim(config))
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(scaling["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return {"rope_freqs.weight": np.float32(factors)}
