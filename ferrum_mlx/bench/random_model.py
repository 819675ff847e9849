"""`python -m ferrum_mlx.bench.random_model FOLDER`: a small model with random weights and a long context.

For what costs time whatever a model has learnt: a context of 8,192 tokens on a laptop. A Llama of 8 layers
with a token a byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, CONTEXT = 8, 512, 8, 2, 1024, 512, 16384
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def write(folder: Path, seed: int = 0) -> Path:
    """The folder, with config, weights and tokenizer in it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(seed)
    kv = KV_HEADS * HIDDEN // HEADS
    matrices = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN)}
    matrices |= {"self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    matrices |= {
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in matrices.items()}
        shapes |= {
            f"model.layers.{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")
        }
    weights = {f"{name}.weight": _values(rng, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save_pretrained(folder)
    return folder


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@click.command(help="Write a small model with random weights into FOLDER.")
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    click.echo(write(folder))


if __name__ == "__main__":
    main()
