"""Configurations of tiny models of mlx-lm's model types: those we run exactly, and those we refuse.

Sliding windows are 8 tokens and LongRoPE or YaRN start from 32, so that short prompts pass them. Left out
are olmo (mlx-lm wants another package for it), bitnet and muse_spark (their layers need Metal) and
prism_hadamard_qwen35 (a way of packing weights).
"""

from __future__ import annotations

from typing import Any

from ferrum_mlx.backends import zoo
from ferrum_mlx.backends.zoo import (
    DELTA,
    GPT,
    GRANITE,
    HEAD,
    MIXED,
    MLA,
    MOE,
    ORIGINAL_LENGTH,
    VOCAB,
    WINDOW,
    Config,
)

# Every name that many types read; a type's arguments take what they know and leave the rest.
COMMON: Config = {
    **zoo.COMMON,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": WINDOW,
    "attention_bias": True,
    "mlp_bias": True,
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
MAMBA2: Config = {**MAMBA, "num_heads": 8, "head_dim": 8}
NEMOTRON: Config = {
    **MAMBA,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "head_dim": 10,
}
JAMBA: Config = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}
KDA: Config = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
    }
}
LFM2: Config = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 48,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
}
BAILING: Config = {
    "layer_group_size": 2,
    "group_norm_size": 2,
    "moe_shared_expert_intermediate_size": 24,
    "head_dim": 12,
}
INDEX: Config = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
LONGCAT: Config = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 24,
    "zero_expert_num": 1,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
MINICPM: Config = {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0}
STABLELM: Config = {"use_qkv_bias": True, "partial_rotary_factor": 0.5}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE_BY_KIND: Config = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
YARN: Config = {**zoo.YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
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
PAGED: dict[str, Config] = {
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
    "pixtral": _text({**HEAD, "model_type": "llama"}),
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

# Exact with modules that run one sequence at a time; first, what `Capabilities.off` says of it.
STATE = "layers keep a state or several caches"
COMPUTES = "compute with keys and values themselves"  # as MLA does, or a softcap before the softmax
WHOLE = "the model as a whole runs one at a time"  # its outermost part computes with positions or K and V
LOOPED: dict[str, tuple[str, Config]] = {
    "afm7": (WHOLE, {"hidden_dim": 48, "num_layers": 4, "num_kv_reuse_layers": 1, "num_heads": 4,
                     "num_kv_heads": 2}),
    "baichuan_m1": (STATE, {"sliding_window_layers": [1, 3], "conv_window": 2}),
    "bailing_hybrid": (COMPUTES, {**MOE, **MLA, **BAILING}),
    "bailing_moe_linear": (STATE, {**MOE, **BAILING}),
    "bailing_moe_v3": (COMPUTES, {**MOE, **MLA, **BAILING, "short_conv_kernel_size": 4}),
    "deepseek_v3": (COMPUTES, {**MOE, **MLA}),
    "deepseek_v32": (STATE, {**MOE, **MLA, **INDEX}),
    "falcon_h1": (STATE, {"head_dim": 12, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8,
                          "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_conv": 4}),
    "gear": (STATE, {**HEAD, "layer_types": ["conv_mixer", "sliding_attention", "full_attention",
                                             "conv_mixer"]}),
    "gemma2": (COMPUTES, {**HEAD, "query_pre_attn_scalar": 10}),
    "glm4_moe_lite": (COMPUTES, {**MOE, **MLA}),
    "glm_moe_dsa": (STATE, {**MOE, **MLA, **INDEX, "rope_parameters": {"rope_theta": 1e4},
                            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
    "gpt_bigcode": (WHOLE, GPT),
    "granitemoehybrid": (STATE, {**GRANITE, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4,
                                 "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4,
                                 "mamba_n_groups": 1}),
    "internlm3/dynamic": (COMPUTES, {"qkv_bias": True, "rope_scaling": {"rope_type": "dynamic",
                                                                        "factor": 2.0}}),
    "jamba": (STATE, {**MOE, **JAMBA, "attn_layer_offset": 1, "attn_layer_period": 2,
                      "expert_layer_offset": 1, "expert_layer_period": 2}),
    "kimi_k25": (COMPUTES, _text({**MOE, **MLA})),
    "kimi_k3": (COMPUTES, _text({**MOE, **MLA, **KDA, "num_experts_per_token": 2, "attn_res_block_size": 2,
                                 "activation_situ_beta": 1.0})),
    "kimi_linear": (COMPUTES, {**MOE, **MLA, **KDA, "head_dim": 12, "model_max_length": 512,
                               "num_experts_per_token": 2}),
    "kimi_vl": (COMPUTES, _text({**MOE, **MLA})),
    "lfm2": (STATE, LFM2),
    "lfm2-vl": (STATE, _text({**LFM2, "model_type": "lfm2"})),
    "lfm2_moe": (STATE, {**MOE, **LFM2, "use_expert_bias": True, "num_dense_layers": 1}),
    "llama4": (WHOLE, _text({**MOE, **HEAD, "model_type": "llama4_text", "attention_chunk_size": WINDOW,
                             "num_hidden_layers": 8,
                             "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
                             "num_experts_per_tok": 1, "use_qk_norm": True, "rope_scaling": None})),
    "longcat_flash": (STATE, {**MOE, **MLA, **LONGCAT}),
    "longcat_flash_ngram": (STATE, {**MOE, **MLA, **LONGCAT, "ngram_vocab_size_ratio": 3}),
    "mamba": (STATE, MAMBA),
    "mamba/bcdt": (STATE, {**MAMBA, "use_bcdt_rms": True}),
    "mamba2": (STATE, MAMBA2),
    "minimax_m3_vl": (STATE, _text({**MOE, **HEAD, "dense_intermediate_size": 64, "rotary_dim": 6,
                                    "shared_intermediate_size": 24, "moe_layer_freq": [0, 1, 1, 1],
                                    "sparse_attention_freq": [0, 1, 0, 1], "index_n_heads": 2,
                                    "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 2})),
    "mistral4": (WHOLE, {**MOE, **MLA, "rope_parameters": YARN}),
    "nemotron_h": (STATE, {**NEMOTRON, "hybrid_override_pattern": ["M", "*", "-", "M", "*"]}),
    "nemotron_h/moe": (STATE, {**NEMOTRON, **MOE, "hybrid_override_pattern": ["M", "*", "E", "M"],
                               "moe_shared_expert_intermediate_size": 24}),
    "olmo_hybrid": (STATE, {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2,
                            "linear_allow_neg_eigval": True}),
    "plamo": (COMPUTES, {"n_shared_head": 2}),
    "plamo2": (COMPUTES, {"hidden_size_per_head": 12, "mamba_d_state": 8, "mamba_num_heads": 4,
                          "full_attention_idx": [1], "attention_window_size": 512}),
    "qwen3/dynamic": (COMPUTES, {**HEAD, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "qwen3_5": (STATE, _text({**DELTA, "model_type": "qwen3_5", "head_dim": 16,
                              "full_attention_interval": 2})),
    "qwen3_5_moe": (STATE, _text({**MOE, **DELTA, "model_type": "qwen3_5_moe_text", "head_dim": 16,
                                  "full_attention_interval": 2})),
    "qwen3_next": (STATE, {**MOE, **DELTA, "head_dim": 12, "partial_rotary_factor": 0.5,
                           "full_attention_interval": 2}),
    "recurrent_gemma": (STATE, {"conv1d_width": 4, "logits_soft_cap": 30.0, "lru_width": 48,
                                "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]}),
    "rwkv7": (STATE, {"head_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
                      "decay_low_rank_dim": 8}),
}

REFUSED: dict[str, tuple[str, Config]] = {
    "bitnet": ("does not run here: ", {}),  # on a CPU: its kernels are Metal's
    # Groups of tokens that are still open, kept in an object of its own:
    "deepseek_v41": ("keeps its state in LayerCache", {
        **MOE, "head_dim": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
        "compress_ratios": [0, 4, 4, 0], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
        "hc_mult": 2}),
    # mlx-lm itself gives other results for other chunks:
    "phi3small": ("is not exact through paged attention", {
        "vocab_size": 100352, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 64,
        "gegelu_limit": 20.0, "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2}),
    "plamo3": ("masks 9 tokens where its cache keeps 8", {**HEAD, "window_size": WINDOW,
                                                          "sliding_window_pattern": 2}),
}
# fmt: on
