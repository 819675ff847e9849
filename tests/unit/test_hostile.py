"""Thousands of mutated model files: each is loaded, or refused in one line, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from .tiny_tokenizers import byte_level

CHILD = Path(__file__).with_name("hostile_child.py")
HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a GGUF file and as a folder of two shards, with a tokenizer in both."""
    folder = tmp_path_factory.mktemp("hostile") / "sound"
    (folder / "hf").mkdir(parents=True)
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"))._hf
    tokenizer.save_pretrained(folder / "hf")
    vocabulary = tokenizer.get_vocab()
    write_folder(folder / "hf", len(vocabulary), vocabulary["<eos>"])
    write_gguf_file(folder / "model.gguf", vocabulary)
    return folder


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


def write_gguf_file(path: Path, vocabulary: dict[str, int]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab"]
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
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3 if token.startswith("<") else 1 for token in tokens])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", vocabulary["<eos>"])
    for name, values in weights(len(tokens)).values():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def attack(folder: Path, backend: str, *plan: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), str(folder), backend, "8", *plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# Per kind, so many that both outcomes are seen; over 2,000 in all.
PLANS = {
    "mlx": (
        "gguf=900",
        "safetensors=350",
        "config=350",
        "index=150",
        "tokenizer=300",
        "tokenizer_config=100",
    ),
    "torch": ("gguf=60", "safetensors=60", "config=100"),
}


@pytest.mark.parametrize("backend", PLANS)
@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_files(backend: str, share: int, sound: Path) -> None:
    """All of them with the slow tests, and always a fifth."""
    pytest.importorskip(backend)
    plan = [f"{kind}={int(count) // share}" for kind, count in (part.split("=") for part in PLANS[backend])]
    report = attack(sound, backend, *plan)
    assert report["faults"] == []
    assert report["grown"] < 300 << 20
    for part in plan:
        kind, _, count = part.partition("=")
        assert sum(report[kind].values()) == int(count)
        assert min(report[kind].values()) > 0, report


def test_a_reader_without_guards_is_found_out(sound: Path) -> None:
    faults = attack(sound, "mlx", "unguarded=60")["faults"]
    assert any("MemoryError" in fault or "OverflowError" in fault for fault in faults)
    assert any("error: " in fault for fault in faults)  # struct's: past the end
