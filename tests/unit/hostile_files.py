"""Sound files for the hostile tests to change: a tiny Llama in each form, and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from .tiny_adapters import write_mlx_lm, write_peft
from .tiny_tokenizers import byte_level

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "llo", "hello", "▁hello"]
CHAT = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def write_all(folder: Path) -> None:
    """`hf`, of two shards; `model.gguf`, with GPT-2's kind of tokenizer; `spm.gguf`, with SentencePiece's;
    `peft` and `mlx_lm`, adapters."""
    (folder / "hf").mkdir(parents=True)
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"))._hf
    tokenizer.save_pretrained(folder / "hf")
    vocabulary = tokenizer.get_vocab()
    write_folder(folder / "hf", len(vocabulary), vocabulary["<eos>"])
    write_byte_level(folder / "model.gguf", vocabulary)
    write_sentencepiece(folder / "spm.gguf")
    sizes = {
        f"model.layers.{layer}.{module}": (HIDDEN, outputs)
        for layer in range(LAYERS)
        for module, outputs in (("self_attn.q_proj", HIDDEN), ("mlp.up_proj", FFN))
    }
    write_peft(folder / "peft", sizes, 1)
    write_mlx_lm(folder / "mlx_lm", sizes, 2)


def weights(vocab: int) -> dict[str, tuple[str, np.ndarray]]:
    """By the checkpoint's name: GGUF's name, values."""
    rng = np.random.default_rng(3)
    shapes = {
        "model.embed_tokens": ("token_embd", (vocab, HIDDEN)),
        "model.norm": ("output_norm", (HIDDEN,)),
    }
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        shapes |= {
            ours + "self_attn.q_proj": (theirs + "attn_q", (HIDDEN, HIDDEN)),
            ours + "self_attn.k_proj": (theirs + "attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ours + "self_attn.v_proj": (theirs + "attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ours + "self_attn.o_proj": (theirs + "attn_output", (HIDDEN, HIDDEN)),
            ours + "mlp.gate_proj": (theirs + "ffn_gate", (FFN, HIDDEN)),
            ours + "mlp.up_proj": (theirs + "ffn_up", (FFN, HIDDEN)),
            ours + "mlp.down_proj": (theirs + "ffn_down", (HIDDEN, FFN)),
            ours + "input_layernorm": (theirs + "attn_norm", (HIDDEN,)),
            ours + "post_attention_layernorm": (theirs + "ffn_norm", (HIDDEN,)),
        }
    return {
        f"{ours}.weight": (f"{theirs}.weight", rng.standard_normal(shape, dtype=np.float32))
        for ours, (theirs, shape) in shapes.items()
    }


def write_folder(folder: Path, vocab: int, eos: int) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: values for name, (_, values) in weights(vocab).items()}
    names = list(arrays)
    index: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-{number}.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_byte_level(path: Path, vocabulary: dict[str, int]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab"]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3 if token.startswith("<") else 1 for token in tokens])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", vocabulary["<eos>"])
    _write_model(writer, len(tokens))


def write_sentencepiece(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    kinds = [2, 3, 3, *[6] * len(BYTES), *[1] * len(PIECES)]
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", [float(-number) for number in range(len(tokens))])
    writer.add_array("tokenizer.ggml.token_type", kinds)
    for role, token in (("unknown", 0), ("bos", 1), ("eos", 2), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    for name, switch in (("add_bos_token", True), ("add_eos_token", False), ("add_space_prefix", True)):
        writer.add_bool(f"tokenizer.ggml.{name}", switch)
    writer.add_string("tokenizer.chat_template", CHAT)
    _write_model(writer, len(tokens))


def _write_model(writer: gguf.GGUFWriter, vocab: int) -> None:
    for key, number in {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    }.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, values in weights(vocab).values():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
