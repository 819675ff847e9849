"""What the tiny random models of every library have in common: sizes, weights, and what is said of them.

Each backend's zoo_configs.py lists model types of its library, its zoo.py builds and checks them. A name
is a model type, or `type/variant` where one type is tried with several configurations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ferrum_mlx.errors import FerrumError, one_line
from ferrum_mlx.model_info import ModelInfo

Config = dict[str, Any]

VOCAB = 199
WINDOW = 8
ORIGINAL_LENGTH = 32  # that LongRoPE and YaRN were stretched from
LAYERS, HEADS, KV_HEADS, HIDDEN, LENGTH = 4, 4, 2, 48, 512

COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
# Families of names that several types read; a type takes those it knows.
HEAD: Config = {"head_dim": 10}  # where it is free, not hidden_size / heads
MIXED: Config = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
MOE: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
MLA: Config = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "attention_bias": False,
}
DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
GPT: Config = {"n_embd": HIDDEN, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_ctx": 128, "n_inner": 64}
GRANITE: Config = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH}

_GAIN = 2.0  # of every matrix: enough for logits that depend on more than the last token


def standard_noise(path: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """float32 normals of that shape, a pure function of (path, seed)."""
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    return rng.standard_normal(tuple(shape), dtype=np.float32)


def weight_noise(path: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Random values of a matrix, or what to add to the initial ones of a vector.

    Norms stay around their own centre, biases and sinks around 0.
    """
    noise = standard_noise(path, shape, seed)
    if noise.ndim < 2:
        spread = 0.05 if path.endswith("bias") else 0.3  # large biases would drown what a token says
        return np.float32(spread) * noise
    return noise * np.float32(_GAIN / np.sqrt(noise.shape[-1]))


def model_type(name: str) -> str:
    return name.split("/")[0]


def info(name: str) -> ModelInfo:
    """As much as an executor reads of it."""
    return ModelInfo(
        model_id=name,
        model_type=model_type(name),
        num_parameters=0,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD["head_dim"],
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        dtype="float32",
        device="cpu",
    )


Outcome = tuple[str, bool, str]  # name; whether it is exact here; why not, or which fast paths are off


def survey(names: Iterable[str], check: Callable[[str], Iterable[str]]) -> Iterator[Outcome]:
    """The outcome of each configuration, as it is found out.

    Args:
        check: builds, loads and checks one, and says which of its fast paths are off; it raises what a
            user would get at load, or what the library raises of a type that cannot be built here.
    """
    for name in sorted(names, key=lambda name: (name.lower(), name)):
        try:
            off = list(check(name))
        except FerrumError as error:
            yield name, False, error.what
        except Exception as error:
            yield name, False, f"it cannot be built here: {one_line(error)}"
        else:
            yield name, True, "; ".join(off)
