"""Tiny random float32 models of transformers' model types: those we run exactly, and those we refuse.

A name is a model type, or `type/variant`. Sliding windows are 8 tokens and LongRoPE or YaRN start from 32,
so that short prompts pass them.
"""

from __future__ import annotations

import copy
import zlib
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ferrum_mlx.model_info import ModelInfo

Config = dict[str, Any]

VOCAB = 199
WINDOW = 8
ORIGINAL_LENGTH = 32
GAIN = 2.0  # of every matrix: enough for logits that depend on more than the last token
COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
MLA: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH}
GPT: Config = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 64}
GRANITE: Config = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
}
LONGROPE: Config = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0 + 0.5 * i for i in range(6)],
    },
}

# fmt: off
EXACT: dict[str, Config] = {
    "afmoe": {**MOE, **HEAD, **MIXED, "num_dense_layers": 1},
    "apertus": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {**MIXED, "logit_scale": 0.5},
    "deepseek_v2": {**MOE, **MLA},
    "deepseek_v3": {**MOE, **MLA},
    "diffllama": {},  # attends twice a layer
    "dots1": {**MOE, **HEAD, **MIXED},
    "ernie4_5": HEAD,
    "exaone4": {**HEAD, **MIXED},
    "gemma": HEAD,
    "gemma2": {**HEAD, **MIXED, "query_pre_attn_scalar": 10},
    "gemma3_text": {**HEAD, **MIXED, "query_pre_attn_scalar": 10},
    "glm": {**HEAD, "pad_token_id": 0},
    "glm4": {**HEAD, "pad_token_id": 0},
    "glm4_moe": {**MOE, **HEAD},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gpt_oss": {**MOE, **HEAD, **MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, **MOE},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": HEAD,
    "llama": HEAD,
    "llama/llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": ORIGINAL_LENGTH}},
    "llama/tied": {"tie_word_embeddings": True},
    "llama/yarn": {"rope_parameters": {**YARN, "rope_theta": 1e4}},
    "minimax_m2": {**MOE, **HEAD},
    "ministral": {**HEAD, **MIXED},
    "ministral3": {**HEAD, "sliding_window": None},
    "mistral": {**HEAD, "sliding_window": WINDOW},
    "mixtral": {**MOE, "sliding_window": None},
    "nemotron": {"hidden_act": "relu2"},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": MOE,
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 64},
    "phi": {},
    "phi3": {},
    "phimoe": MOE,
    "qwen2": {},
    "qwen2/window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": MOE,
    "qwen3": HEAD,
    "qwen3_moe": {**MOE, **HEAD},
    "seed_oss": HEAD,
    "smollm3": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": WINDOW},
}

# What the message must say.
REFUSED: dict[str, tuple[str, Config]] = {
    "bloom": ("interface", {"n_layer": 3, "n_head": 4}),
    "deepseek_v32": ("DynamicIndexedLayer", {**MOE, **MLA}),
    "doge": ("sees other keys", {}),
    "falcon_h1": ("LinearAttention", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    "jamba": ("LinearAttentionLayer", {**MOE, "attn_layer_offset": 1, "attn_layer_period": 2,
                                       "use_mamba_kernels": False}),
    "lfm2": ("LinearAttentionLayer", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text": ("sees other keys", {**MOE, **HEAD, "attention_chunk_size": WINDOW,
                                        "intermediate_size_mlp": 64}),
    "minimax": ("change each other", {**MOE, **HEAD}),
    "mamba": ("LinearAttentionLayer", {"state_size": 8}),
    "qwen3_next": ("LinearAttentionLayer", {**MOE, **HEAD, "linear_num_value_heads": 4,
                                             "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                                             "linear_value_head_dim": 8}),
    "rwkv": ("interface", {}),
}
# fmt: on
VARIANTS: dict[str, Config] = {
    "phi3/longrope": LONGROPE,
    "llama/dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


def model_type(name: str) -> str:
    return name.split("/")[0]


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model whose weights are a pure function of (name, seed)."""
    table = EXACT | VARIANTS | {key: config for key, (_, config) in REFUSED.items()}
    fields = copy.deepcopy(COMMON | table[name])
    config = AutoConfig.for_model(model_type(name), **fields)
    torch.manual_seed(seed)  # for what keeps its initial value
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(_weight(path, parameter, seed))
    return model.eval()


def _weight(path: str, initial: torch.Tensor, seed: int) -> torch.Tensor:
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    noise = torch.from_numpy(rng.standard_normal(initial.shape, dtype=np.float32))
    if initial.ndim < 2:  # norms stay around their own centre, biases and sinks around 0
        spread = 0.05 if path.endswith("bias") else 0.3
        return initial + spread * noise
    return noise * (GAIN / initial.shape[-1] ** 0.5)


@cache
def reference(name: str) -> PreTrainedModel:
    """A copy that no executor has touched."""
    return build(name)


def generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by transformers; the mask keeps it from hiding ids that equal the pad id."""
    model.generation_config.eos_token_id = None  # an output cut short proves nothing
    ids = torch.tensor([prompt])
    known = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return known[0, len(prompt) :].tolist()


def info(name: str) -> ModelInfo:
    """As much as an executor reads of it."""
    return ModelInfo(
        model_id=name,
        model_type=model_type(name),
        num_parameters=0,
        hidden_size=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        vocab_size=VOCAB,
        max_sequence_length=512,
        dtype="float32",
        device="cpu",
    )
