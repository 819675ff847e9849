"""Configurations of tiny models of transformers' model types: those we run exactly, and those we refuse.

Sliding windows are 8 tokens and LongRoPE or YaRN start from 32, so that short prompts pass them. Left out
are types whose sizes no configuration makes small.
"""

from __future__ import annotations

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
    YARN,
    Config,
)

COMMON: Config = {**zoo.COMMON, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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
GEMMA: Config = {**HEAD, **MIXED, "query_pre_attn_scalar": 10}
PER_LAYER: Config = {
    **HEAD,
    **MIXED,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
}
GEMMA4: Config = {**PER_LAYER, "global_head_dim": 14}
# The part of a multimodal checkpoint that text passes by.
VISION: Config = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "image_size": 28,
    "crop_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 48,
}
AUDIO: Config = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "nemo_conv_channels": 16,
    "depthwise_separable_out_channel": 16,
}
CHUNKED: Config = {**MOE, **HEAD, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64}
MAMBA: Config = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_expand": 2}
KDA: Config = {
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
    }
}
INDEX: Config = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
STABLELM: Config = {"partial_rotary_factor": 0.5}


def _text(config: Config, **outer: object) -> Config:
    """A multimodal checkpoint of a text model."""
    return {"text_config": COMMON | config, "vision_config": VISION, **outer}


# fmt: off
# ruff would give every entry of these tables a line of its own.
EXACT: dict[str, Config] = {
    "afmoe": {**MOE, **HEAD, **MIXED, "num_dense_layers": 1},
    "apertus": {},
    "arcee": HEAD,
    "aria_text": {**MOE, **HEAD, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**MOE, **MLA},
    "biogpt": {},
    "bitnet": {},
    "codegen": {**GPT, "rotary_dim": 8},
    "cohere": {"logit_scale": 0.5},
    "cohere/qk": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {**MIXED, "logit_scale": 0.5},
    "cohere2_moe": {**MOE, **HEAD, **MIXED},
    "ctrl": {**GPT, "dff": 64},
    "cwm": {**HEAD, **MIXED},
    "dbrx": {"d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 512,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48}},
    "deepseek_v2": {**MOE, **MLA},
    "deepseek_v3": {**MOE, **MLA},
    "deepseek_v3/yarn": {**MOE, **MLA, "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0,
                                                           "mscale_all_dim": 0.7}},
    "diffllama": {},  # attends twice a layer
    "dots1": {**MOE, **HEAD, **MIXED},
    "ernie4_5": HEAD,
    "ernie4_5_moe": {**HEAD, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
                     "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "exaone": {"num_layers": 3},
    "exaone4": {**HEAD, **MIXED},
    "exaone_moe": {**MOE, **HEAD, **MIXED},
    "flex_olmo": MOE,
    "gemma": HEAD,
    "gemma2": GEMMA,
    "gemma3": _text(GEMMA, mm_tokens_per_image=4),
    "gemma3_text": GEMMA,
    "gemma3n_text": {**PER_LAYER, "laurel_rank": 8},
    "gemma4": _text(GEMMA4, audio_config=None),
    "gemma4_text": GEMMA4,
    "glm": HEAD,
    "glm4": HEAD,
    "glm4/partial": {**HEAD, "partial_rotary_factor": 0.4},
    "glm4_moe": {**MOE, **HEAD},
    "glm4_moe_lite": {**MOE, **MLA},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gpt_oss": {**MOE, **HEAD, **MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": GRANITE,
    "granite_swa": {**GRANITE, **MIXED},
    "granitemoe": {**GRANITE, **MOE},
    "granitemoe_swa": {**GRANITE, **MOE, **MIXED},
    "granitemoehybrid/attention": {**GRANITE, **MOE, **MAMBA, "layer_types": ["attention"] * 4,
                                   "position_embedding_type": "rope", "shared_intermediate_size": 24},
    "granitemoeshared": {**GRANITE, **MOE, "shared_intermediate_size": 24},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**MOE, **HEAD, "moe_topk": 2, "num_shared_expert": 1},
    "hy_v3": {**MOE, **HEAD},
    "hyperclovax": HEAD,
    "internlm3": HEAD,
    "iquestcoder": HEAD,
    "jais2": HEAD,
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 12},
    "laguna": {**MOE, **HEAD, **MIXED},
    "llama": HEAD,
    "llama/bias": {**HEAD, "attention_bias": True, "mlp_bias": True},
    "llama/llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": ORIGINAL_LENGTH}},
    "llama/tied": {"tie_word_embeddings": True},
    "llama/yarn": {"rope_parameters": {**YARN, "rope_theta": 1e4}},
    "longcat_flash": {**MOE, **MLA, "head_dim": 8, "ffn_hidden_size": 64, "moe_topk": 2, "num_layers": 2,
                      "expert_ffn_hidden_size": 24, "zero_expert_num": 1},
    "mellum": {**MOE, **HEAD, **MIXED},
    "mimo_v2_flash": {**MOE, **HEAD, **MIXED, "v_head_dim": 8},
    "minicpm3": MLA,
    "minimax_m2": {**MOE, **HEAD},
    "ministral": {**HEAD, **MIXED},
    "ministral3": {**HEAD, "sliding_window": None},
    "mistral": {**HEAD, "sliding_window": WINDOW},
    "mixtral": {**MOE, "sliding_window": None},
    "modernbert-decoder": MIXED,
    "nanochat": HEAD,
    "nemotron": {"hidden_act": "relu2"},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": MOE,
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi4_multimodal": {"vision_config": VISION, "audio_config": AUDIO},
    "phimoe": MOE,
    "qwen2": {},
    "qwen2/window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": MOE,
    "qwen3": HEAD,
    "qwen3/yarn": {**HEAD, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    "qwen3_moe": {**MOE, **HEAD},
    "sarvam_mla": {**MOE, **MLA},
    "sarvam_moe": {**MOE, **HEAD},
    "seed_oss": HEAD,
    "smollm3": {},
    "solar_open": {**MOE, **HEAD},
    "stablelm": STABLELM,
    "stablelm/parallel": {**STABLELM, "use_qkv_bias": True, "use_parallel_residual": True,
                          "qk_layernorm": True},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": GEMMA,
    "youtu": MLA,
}

# Exact up to a length, which the engine keeps to: see rope_ceiling.
BOUNDED: dict[str, Config] = {
    "llama/dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "phi3/longrope": LONGROPE,
}

# First, what the message says.
STATE = "LinearAttention"  # part of the name of what a layer keeps
INDEXED = "DynamicIndexedLayer"
INTERFACE = "does not attend through transformers' attention interface"
OTHER_KEYS = "sees other keys"
REFUSED: dict[str, tuple[str, Config]] = {
    "bamba": (STATE, {**MAMBA, "attn_layer_indices": [1, 3]}),
    "bloom": (INTERFACE, {"n_layer": 3, "n_head": 4}),
    "deepseek_v32": (INDEXED, {**MOE, **MLA}),
    "deepseek_v4": ("DeepseekV4HCACache", {**MOE, "q_lora_rank": 24, "head_dim": 16}),
    "doge": (OTHER_KEYS, {}),
    "falcon": (INTERFACE, {}),
    "falcon_h1": (STATE, {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    "falcon_mamba": (STATE, {"state_size": 8}),
    "gemma4_text/shared": ("DummyLayer", {**GEMMA4, "num_kv_shared_layers": 2}),
    "glm_moe_dsa": (INDEXED, {**MOE, **MLA, **INDEX}),
    "gpt_neo": (INTERFACE, {"num_layers": 4, "num_heads": 4, "window_size": WINDOW,
                            "attention_types": [[["global", "local"], 2]]}),
    "gpt_neox_japanese": (INTERFACE, {}),
    "granitemoehybrid": (STATE, {**GRANITE, **MOE, **MAMBA, "layer_types": ["mamba", "attention"] * 2}),
    "jamba": (STATE, {**MOE, "attn_layer_offset": 1, "attn_layer_period": 2}),
    "kimi_linear": (STATE, {**MOE, **MLA, **KDA}),
    "lfm2": (STATE, {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": (STATE, {**MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    "llama4": (OTHER_KEYS, _text(CHUNKED)),
    "llama4_text": (OTHER_KEYS, CHUNKED),
    "mamba": (STATE, {"state_size": 8}),
    "mamba2": (STATE, {"state_size": 8, "num_heads": 8, "head_dim": 12, "n_groups": 1}),
    "minimax": ("change each other", {**MOE, **HEAD}),
    "minimax_m3_vl_text": ("MiniMaxM3VLSparseCacheLayer", {
        **MOE, **HEAD, "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4,
        "index_topk_blocks": 2, "dense_intermediate_size": 64, "shared_intermediate_size": 24,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2}),
    "mpt": (INTERFACE, {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}),
    "olmo_hybrid": (STATE, {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "openai-gpt": (INTERFACE, GPT),
    "qwen3_5": (STATE, _text({**DELTA, "head_dim": 16})),
    "qwen3_5_moe_text": (STATE, {**MOE, **DELTA, "head_dim": 16}),
    "qwen3_5_text": (STATE, {**DELTA, "head_dim": 16}),
    "qwen3_next": (STATE, {**MOE, **HEAD, **DELTA}),
    "recurrent_gemma": ("keeps no cache", {"lru_width": 48, "attention_window_size": WINDOW,
                                           "block_types": ["recurrent", "attention"]}),
    "rwkv": (INTERFACE, {}),
    "xglm": (INTERFACE, {"d_model": 48, "ffn_dim": 64, "attention_heads": 4, "num_layers": 3}),
}
# fmt: on
