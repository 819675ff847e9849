"""A tiny random model of each family of GGUF, as a hub's folder has it, and llama.cpp's answers from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]
Arrays = dict[str, np.ndarray]

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, WINDOW, LENGTH = 96, 64, 96, 4, 2, 8, 128
SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
GEMMA: Config = {
    **SIZES,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": WINDOW,
}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE: Config = {
    "type": "longrope",
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 1.75],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}

LLAMA_CPP = json.loads((Path(__file__).parent / "data/llama_cpp_answers.json").read_text(encoding="utf-8"))

# family or family/variant -> config.json
CONFIGS: dict[str, Config] = {
    "llama": {**SIZES, "model_type": "llama"},
    "llama/bias": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama/linear": {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama/llama3": {
        **SIZES,
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen2": {**SIZES, "model_type": "qwen2", "rope_theta": 1e6},
    "qwen2/yarn": {**SIZES, "model_type": "qwen2", "rope_scaling": YARN},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3/yarn": {**SIZES, "model_type": "qwen3", "head_dim": 32, "rope_scaling": YARN},
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
    "phi3": {
        **SIZES,
        "model_type": "phi3",
        "sliding_window": WINDOW,
        "original_max_position_embeddings": LENGTH,
        "pad_token_id": None,
    },
    "phi3/longrope": {
        **SIZES,
        "model_type": "phi3",
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
        "pad_token_id": None,
    },
}

TWO_NORMS = ("post_attention_layernorm",)
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def assert_llama_cpps_answer(name: str, logits: Callable[[list[int]], np.ndarray]) -> None:
    """Whether each token that llama.cpp chose is the likeliest, and as likely as there.

    Args:
        logits: of a sequence of ids, [length, vocabulary].
    """
    prompt, answer = LLAMA_CPP["prompt"], LLAMA_CPP["answers"][name]
    found = logits(prompt + answer["ids"])[len(prompt) - 1 : -1].astype(np.float64)
    likely = found - np.log(np.exp(found).sum(axis=1, keepdims=True))
    found[:, CONFIGS[name]["eos_token_id"]] = -np.inf  # it was asked to go on
    assert found.argmax(axis=1).tolist() == answer["ids"]
    chosen = likely[np.arange(len(found)), answer["ids"]]
    rounding = 1e-3 if name.startswith("gemma") else 1e-4  # llama.cpp's gelu is a table in float16
    np.testing.assert_allclose(chosen, answer["logprobs"], atol=rounding)


def family(name: str) -> str:
    return name.split("/")[0]


def head_dim(config: Config) -> int:
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def weights(name: str, config: Config) -> Arrays:
    """By the checkpoint's names; multiples of 2^-10, so that a norm + 1 - 1 is the norm."""
    rng = np.random.default_rng(5)

    def noise(*shape: int) -> np.ndarray:
        scale = 2.0 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        return (np.round(rng.standard_normal(shape) * scale * 1024) / 1024).astype(np.float32)

    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    gemma = name.startswith("gemma")
    centre = np.float32(0 if gemma else 1)
    found: Arrays = {
        # gemma multiplies its embeddings; all logits would be of the last token
        "model.embed_tokens.weight": noise(config["vocab_size"], hidden) * np.float32(0.25 if gemma else 1),
        "model.norm.weight": noise(hidden) + centre,
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = noise(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        linear = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
        if family(name) == "phi3":
            linear |= {"self_attn.qkv_proj": (q + 2 * kv, hidden), "mlp.gate_up_proj": (2 * ffn, hidden)}
        else:
            linear |= {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden)}
            linear |= {"self_attn.v_proj": (kv, hidden)}
            linear |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
        found |= {f"{start}{module}.weight": noise(*shape) for module, shape in linear.items()}
        norms = dict.fromkeys(["input_layernorm", *(FOUR_NORMS if gemma else TWO_NORMS)], hidden)
        if family(name) in ("qwen3", "gemma3"):
            norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
        found |= {f"{start}{module}.weight": noise(count) + centre for module, count in norms.items()}
        for module in _with_bias(name, config):
            found[f"{start}{module}.bias"] = noise(linear[module][0])
    return found


def _with_bias(name: str, config: Config) -> list[str]:
    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if family(name) == "qwen2":
        return attention
    if config.get("attention_bias"):
        return [*attention, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return []


def write_folder(folder: Path, config: Config, arrays: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
