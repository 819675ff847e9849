"""Tiny random float32 models of mlx-lm's model types: those we run exactly, and those we refuse.

A name is a model type, or `type/variant` where one type is tried with several configurations. Sliding
windows are 8 tokens and LongRoPE or YaRN start from 32, so that short prompts pass them. Left out are
olmo (mlx-lm wants another package for it), bitnet (its layers need Metal) and phi3small (it writes to
fixed ids above 100,000, past a tiny vocabulary).
"""

from __future__ import annotations

import copy
import zlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from ferrum_mlx.model_info import ModelInfo

Config = dict[str, Any]

VOCAB = 199
WINDOW = 8
ORIGINAL_LENGTH = 32  # that LongRoPE and YaRN were stretched from
GAIN = 2.0  # of every matrix: enough for logits that depend on more than the last token

# Every name that many types read; a type's arguments take what they know and leave the rest.
COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}
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
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "attention_bias": False,
}
MAMBA: Config = {
    "conv_kernel": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "time_step_limit": [0.0, 10.0],
}
DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
GPT: Config = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_ctx": 128, "n_inner": 64}
GRANITE: Config = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
}
MINICPM: Config = {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0}
HEAD: Config = {"head_dim": 10}  # where it is free, not hidden_size / heads
MIXED: Config = {"layer_types": ["sliding_attention", "full_attention"] * 2}
STABLELM: Config = {"use_qkv_bias": True, "partial_rotary_factor": 0.5}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE_BY_KIND: Config = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH}
YARN |= {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
GEMMA: Config = {**HEAD, "query_pre_attn_scalar": 10, "sliding_window_pattern": 2}
GEMMA3N: Config = {
    **HEAD,
    **MIXED,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "rope_local_base_freq": 1e3,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4: Config = {
    **HEAD,
    **MIXED,
    "global_head_dim": 14,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
}


def _longrope(rotated: int) -> Config:
    """Factors of a head's rotated dimensions."""
    return {
        "type": "longrope",
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "short_factor": [1.0] * (rotated // 2),
        "long_factor": [1.0 + 0.5 * i for i in range(rotated // 2)],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    }


def _text(config: Config, **outer: Any) -> Config:
    """A multimodal checkpoint of a text model."""
    return {"text_config": COMMON | config, **outer}


# fmt: off
# ruff would give every entry of these two tables a line of its own.
EXACT: dict[str, Config] = {
    "Klear": MOE,
    "afmoe": {**MOE, **HEAD, **MIXED, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": {**MOE, "use_qk_norm": True},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "logit_scale": 0.5,
                "sliding_window_pattern": 2},
    "dbrx": {"d_model": 48, "n_layers": 3, "n_heads": 4,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek": MOE,
    "deepseek_v2": {**MOE, **MLA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "dots1": {**MOE, **HEAD},
    "ernie4_5": {**HEAD, "use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": True},
    "exaone": {"num_layers": 3},
    "exaone4": {**HEAD, "sliding_window_pattern": "LLLG", "rope_scaling": None},
    "exaone_moe": {**MOE, **HEAD, **MIXED, "is_moe_layer": [False, True, True, True]},
    "gemma": HEAD,
    "gemma3": _text({**GEMMA, "model_type": "gemma3_text"}, vocab_size=VOCAB),
    "gemma3_text": GEMMA,
    "gemma3n": _text({**GEMMA3N, "model_type": "gemma3n_text"}),
    "gemma4": _text({**GEMMA4, "model_type": "gemma4_text"}, vocab_size=VOCAB),
    "gemma4_text": GEMMA4,
    "gemma4_text/shared": {**GEMMA4, "num_kv_shared_layers": 2},
    "glm": HEAD,
    "glm4": {**HEAD, "partial_rotary_factor": 0.4},
    "glm4_moe": {**MOE, **HEAD, "rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.4},
    "gpt2": GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {**MOE, **HEAD, **MIXED},
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, **MOE},
    "helium": HEAD,
    "hunyuan": {**MOE, "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
                "use_cla": True, "cla_share_factor": 2,
                "rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 100.0}},
    "hunyuan_v1_dense": HEAD,
    "internlm2": {},
    "internlm3": {"qkv_bias": True},
    "iquestloopcoder": {**HEAD, "loop_num": 2, "loop_window_size": WINDOW},
    "laguna": {**MOE, **HEAD, **MIXED},
    "lille-130m": {"block_size": 128, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 3},
    "llama": HEAD,
    "llama/llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 4.0,
                                      "original_max_position_embeddings": ORIGINAL_LENGTH}},
    "llama/tied": {"tie_word_embeddings": True},
    "llama/window": {**HEAD, **MIXED},
    "llama4_text": {**HEAD, "intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "mellum": {**MOE, **HEAD, **MIXED, **ROPE_BY_KIND},
    "mimo": {},
    "mimo_v2_flash": {**MOE, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
                      "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
                      "sliding_window_size": WINDOW, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                      "layernorm_epsilon": 1e-5, "swa_rope_theta": 1e4, "swa_num_attention_heads": 4,
                      "swa_num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "swa_head_dim": 12,
                      "swa_v_head_dim": 8, "partial_rotary_factor": 0.5},
    "minicpm": MINICPM,
    "minicpm3": {**MLA, **MINICPM, "rope_scaling": _longrope(8)},
    "minimax": {**MOE, **HEAD, "shared_intermediate_size": 24, "rotary_dim": 6},
    "ministral3": {**HEAD, **MIXED, "rope_parameters": YARN},
    "mistral": HEAD,
    "mistral3": _text({**HEAD, **MIXED, "model_type": "ministral3", "rope_parameters": YARN}),
    "mixtral": MOE,
    "muse_glimmer": {**HEAD, **MIXED},
    "nanbeige": {**HEAD, "num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"num_hidden_layers": 2, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}]},
    "olmo2": HEAD,
    "olmo3": {**HEAD, **MIXED},
    "olmoe": MOE,
    "openelm": {"num_transformer_layers": 3, "model_dim": 48, "head_dim": 8, "ffn_dim_divisor": 8,
                "num_query_heads": [4, 6, 4], "num_kv_heads": [2, 3, 2], "ffn_multipliers": [1.0, 2.0, 1.5]},
    "phi": {},
    "phi3": {},
    "phi3/longrope": {"rope_scaling": _longrope(12), "original_max_position_embeddings": ORIGINAL_LENGTH},
    "phimoe": {**MOE, "rope_scaling": _longrope(12), "original_max_position_embeddings": ORIGINAL_LENGTH},
    "phixtral": {"num_vocab": VOCAB, "model_dim": 48, "num_heads": 4, "num_layers": 3, "rotary_dim": 8,
                 "num_local_experts": 4},
    "qwen": {"kv_channels": 12},
    "qwen2": {},
    "qwen2_moe": MOE,
    "qwen2_vl": _text({"model_type": "qwen2"}),
    "qwen3": HEAD,
    "qwen3/yarn": {**HEAD, "rope_scaling": YARN},
    "qwen3_moe": {**MOE, **HEAD},
    "qwen3_vl": _text({**HEAD, "model_type": "qwen3"}),
    "qwen3_vl_moe": _text({**MOE, **HEAD, "model_type": "qwen3_moe"}),
    "seed_oss": HEAD,
    "smollm3": HEAD,
    "solar_open": {**MOE, **HEAD, "partial_rotary_factor": 1.0},
    "spark2_5": {**HEAD, **MIXED, **ROPE_BY_KIND},
    "stablelm": STABLELM,
    "stablelm/parallel": {**STABLELM, "use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {},
    "step3p5": {**HEAD, **MIXED, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2,
                "moe_intermediate_size": 24, "share_expert_dim": 24, "moe_layers_enum": "1,2,3"},
    "talkie": {"head_dim": 12},
    "telechat3": HEAD,
    "youtu_llm": MLA,
}

ARRAYS = "keeps its state in ArraysCache"  # of state-space and gated-delta layers
SEVERAL = "keeps its state in CacheList"
CHUNKED = "keeps its state in ChunkedKVCache"
DRIVEN = "cannot be driven through paged attention"  # it computes with what are opaque handles to us
REFUSED: dict[str, tuple[str, Config]] = {
    "afm7": (DRIVEN, {"hidden_dim": 48, "num_layers": 4, "num_kv_reuse_layers": 1, "num_heads": 4,
                      "num_kv_heads": 2}),
    "baichuan_m1": (SEVERAL, {"sliding_window_layers": [1, 3], "conv_window": 2}),
    "deepseek_v3": (DRIVEN, {**MOE, **MLA}),
    "deepseek_v32": (SEVERAL, {**MOE, **MLA, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}),
    "falcon_h1": (SEVERAL, {}),
    "gemma2": (DRIVEN, HEAD),  # its softcap stands between the product and the softmax
    "glm4_moe_lite": (DRIVEN, {**MOE, **MLA}),
    "gpt_bigcode": (DRIVEN, GPT),
    "granitemoehybrid": (ARRAYS, {**GRANITE, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4,
                                  "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4,
                                  "mamba_n_groups": 1}),
    "jamba": (ARRAYS, {**MOE, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
                       "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}),
    "lfm2": (ARRAYS, {"conv_bias": False, "conv_L_cache": 3, "block_dim": 48, "block_ff_dim": 64,
                      "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
                      "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3]}),
    "llama4": (CHUNKED, _text({**MOE, **HEAD, "model_type": "llama4_text", "attention_chunk_size": 8,
                               "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
                               "num_experts_per_tok": 1, "use_qk_norm": True, "rope_scaling": None})),
    "longcat_flash": (SEVERAL, {**MOE, **MLA, "attention_method": "MLA", "zero_expert_type": "identity",
                                "ffn_hidden_size": 64, "moe_topk": 2, "expert_ffn_hidden_size": 24,
                                "zero_expert_num": 1, "num_layers": 2, "mla_scale_q_lora": True,
                                "mla_scale_kv_lora": True}),
    "mamba": (ARRAYS, MAMBA),
    "mamba2": (ARRAYS, {**MAMBA, "num_heads": 8, "head_dim": 8, "intermediate_size": 64}),
    "mistral4": (DRIVEN, {**MOE, **MLA, "rope_parameters": YARN}),
    "plamo": (DRIVEN, {"n_shared_head": 2}),
    # mlx-lm itself gives other results for other chunks:
    "plamo3": ("masks 9 tokens where its cache keeps 8", {**HEAD, "window_size": WINDOW,
                                                          "sliding_window_pattern": 2}),
    "qwen3/dynamic": (DRIVEN, {**HEAD, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "qwen3_5": (ARRAYS, _text({**DELTA, "model_type": "qwen3_5", "head_dim": 16,
                               "full_attention_interval": 2})),
    "qwen3_next": (ARRAYS, {**MOE, **DELTA, "head_dim": 12, "partial_rotary_factor": 0.5,
                            "full_attention_interval": 2}),
    "recurrent_gemma": (ARRAYS, {"conv1d_width": 4, "logits_soft_cap": 30.0, "lru_width": 48,
                                 "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]}),
    "rwkv7": (ARRAYS, {"head_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
                       "decay_low_rank_dim": 8}),
}
# fmt: on


def build(name: str, seed: int = 0) -> nn.Module:
    """A model whose weights are a pure function of (name, seed)."""
    config = EXACT[name] if name in EXACT else REFUSED[name][1]
    config = copy.deepcopy(
        {**COMMON, **config, "model_type": model_type(name)}
    )  # some types change what they get
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # for what keeps its initial value
    model = model_class(args_class.from_dict(config))
    weights = [(path, _weight(path, array, seed)) for path, array in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(path: str, initial: mx.array, seed: int) -> mx.array:
    if not mx.issubdtype(initial.dtype, mx.floating):
        return initial
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    noise = rng.standard_normal(initial.shape, dtype=np.float32)
    if initial.ndim < 2:  # norms stay around 1, biases and sinks around 0
        spread = 0.05 if path.endswith("bias") else 0.3  # large biases would drown what a token says
        return initial.astype(mx.float32) + mx.array(spread * noise)
    return mx.array(noise * np.float32(GAIN / np.sqrt(initial.shape[-1])))


def model_type(name: str) -> str:
    return name.split("/")[0]


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
