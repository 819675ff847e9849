"""What sets the model families of GGUF apart: the modules of a layer, and what llama.cpp's converter changed.

Names are a checkpoint's; the gguf package knows what each is called in a GGUF of the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ferrum_mlx.errors import UnsupportedModelError, shown
from ferrum_mlx.gguf import GGUFFile

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_TOP = ("model.embed_tokens", "model.norm", "lm_head")


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of GGUF.

    Attributes:
        model_type: its name in a config.json.
        architecture: transformers' class.
        layer: the modules of a layer that have weights.
        biases: of them, those that have a bias where the file has one.
        interleaved: rows of the q and k projections are stored with the two halves of a head interleaved,
            for llama.cpp's form of RoPE; checkpoints keep the halves apart.
        norm_offset: what was added to the weights of norms.
        free_head_size: the size of a head is not hidden size / heads.
    """

    model_type: str
    architecture: str
    layer: tuple[str, ...]
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    norm_offset: float = 0.0
    free_head_size: bool = False


_PLAIN = (*_ATTENTION, *_MLP, *_NORMS)

FAMILIES = {
    "llama": Family(  # and Mistral, SmolLM
        "llama",
        "LlamaForCausalLM",
        _PLAIN,
        biases=(*_ATTENTION, *_MLP),
        interleaved=True,
        free_head_size=True,
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _PLAIN, biases=_ATTENTION[:3]),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", (*_PLAIN, *_QK_NORMS), free_head_size=True),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (*_ATTENTION, *_MLP, *_FOUR_NORMS),
        norm_offset=1.0,
        free_head_size=True,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (*_ATTENTION, *_QK_NORMS, *_MLP, *_FOUR_NORMS),
        norm_offset=1.0,
        free_head_size=True,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *_NORMS),
    ),
}


def family_of(gguf: GGUFFile) -> Family:
    """A file's family.

    Raises:
        UnsupportedModelError: an architecture that is not in FAMILIES.
    """
    name = gguf.get("general.architecture", str)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{gguf.path} is of architecture {shown(name)}",
            f"supported in GGUF: {', '.join(FAMILIES)}",
            "use the model's safetensors folder or hub repository",
        )
    return FAMILIES[name]


@cache
def module_names(architecture: str) -> dict[str, str]:
    """Names of modules in a GGUF of a family -> in a checkpoint; a layer's are those of layer 0."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap

    number = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    names = TensorNameMap(number, 1)
    modules = (*_TOP, *(f"model.layers.0.{module}" for module in FAMILIES[architecture].layer))
    return {stored: module for module in modules if (stored := names.get_name(module)) is not None}
