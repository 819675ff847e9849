"""What a model keeps of a sequence, by its config alone: keys and values, and recurrent layers' states.

The shapes are those that mlx-lm's classes allocate, and transformers' where it has the same; of a sliding
window that its class may not know, all tokens are counted. Of a model type that is not listed nothing is
said: a guess would be taken for a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_mlx.catalog import KVShape, StateShape
from ferrum_mlx.errors import UnsupportedModelError

Config = Mapping[str, Any]
Counts = tuple[int, int]  # layers that attend, layers that carry a state

_MOST = 2**31 - 1
# Keys and values of every head in every layer, all of one shape, but for windows in `layer_types`.
_ATTENTION = {
    *("cohere", "ernie4_5", "exaone_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt_oss", "granite"),
    *("granitemoe", "internlm2", "internlm3", "llama", "mimo", "ministral3", "mistral", "mixtral", "olmo2"),
    *("nemotron", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
}


class Kept(NamedTuple):
    kv: tuple[KVShape, ...]
    states: tuple[StateShape, ...]


def kept_by(config: Config) -> Kept | None:
    """None where nobody can tell: a type that is not listed, or a config without the sizes it needs."""
    kind, nested = config.get("model_type"), config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config  # multimodal checkpoints nest it
    try:
        if kind in _ATTENTION:
            return Kept(_windows(text), ())
        if kind not in _RECURRENT:
            return None
        layout, state = _RECURRENT[kind]
        attending, recurrent = layout(text)
        kv = (_keys_and_values(text, attending),) if attending else ()
        return Kept(kv, (state(text, recurrent),) if recurrent else ())
    except (KeyError, TypeError, ValueError):
        return None


def check_states(has_states: bool, backend: str, where: str | Path) -> None:
    """Whether a backend runs layers that carry a state.

    Raises:
        UnsupportedModelError: torch does not.
    """
    if has_states and backend == "torch":
        raise UnsupportedModelError(
            f"{where} has recurrent layers, whose state --backend torch does not keep",
            "supported on torch: keys and values of past tokens",
            "take --backend mlx, or choose another model",
        )


def _size(text: Config, *names: str) -> int:
    """The first of these that is there."""
    value = next((text[name] for name in names if text.get(name) is not None), None)
    if type(value) is not int or not 0 < value <= _MOST:
        raise ValueError
    return value


def _keys_and_values(text: Config, layers: int, window: int | None = None) -> KVShape:
    heads = _size(text, "num_attention_heads")
    head_dim = (
        _size(text, "hidden_size") // heads if text.get("head_dim") is None else _size(text, "head_dim")
    )
    kv_heads = _size(text, "num_key_value_heads", "num_attention_heads")
    return KVShape(layers=layers, heads=kv_heads, head_dim=head_dim, window=window)


def _windows(text: Config) -> tuple[KVShape, ...]:
    layers, kinds = _size(text, "num_hidden_layers"), text.get("layer_types")
    sliding = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    if not sliding:
        return (_keys_and_values(text, layers),)
    if len(kinds or ()) != layers:
        raise ValueError
    windowed = _keys_and_values(text, sliding, _size(text, "sliding_window"))
    return (_keys_and_values(text, layers - sliding), windowed) if sliding < layers else (windowed,)


def _by_interval(text: Config) -> Counts:
    layers = _size(text, "num_hidden_layers")
    attending = layers // (_size(text, "full_attention_interval") if "full_attention_interval" in text else 4)
    return attending, layers - attending


def _by_layer(names: Mapping[str, str]) -> Callable[[Config], Counts]:
    """`names` of layers, of which "A" attend and "S" carry a state; "-" do neither."""

    def counts(text: Config) -> Counts:
        keys = ("hybrid_override_pattern", "layers_block_type", "layer_types")
        kinds = [names[name] for name in text[next((key for key in keys if text.get(key)), keys[0])]]
        return kinds.count("A"), kinds.count("S")

    return counts


def _short_layers(text: Config) -> Counts:
    """Attention where an older config's numbers of layers say so."""
    if (attending := text.get("full_attn_idxs")) is None:
        return _by_layer({"full_attention": "A", "conv": "S"})(text)
    layers = set(range(_size(text, "num_hidden_layers")))
    return len(layers.intersection(attending)), len(layers.difference(attending))


def _both(text: Config) -> Counts:
    layers = _size(text, "num_hidden_layers")
    return layers, layers


def _state_alone(text: Config) -> Counts:
    return 0, _size(text, "num_hidden_layers")


def _gated_delta(text: Config, layers: int) -> StateShape:
    """Inputs of the convolution over keys, queries and values; a matrix a value head."""
    heads, size = _size(text, "linear_num_value_heads"), _size(text, "linear_value_head_dim")
    keys = _size(text, "linear_key_head_dim")
    channels = 2 * _size(text, "linear_num_key_heads") * keys + heads * size
    convolved = (_size(text, "linear_conv_kernel_dim") - 1) * channels
    return StateShape(layers=layers, numbers=convolved, float32=heads * size * keys)


def _ssm(layers: int, inner: int, groups: int, size: int, kernel: int) -> StateShape:
    """Inputs of the convolution over x, B and C; `size` numbers a channel."""
    return StateShape(layers=layers, numbers=(kernel - 1) * (inner + 2 * groups * size), float32=inner * size)


def _mamba2(text: Config, layers: int) -> StateShape:
    inner = _size(text, "num_heads") * _size(text, "head_dim")
    size, kernel = _size(text, "ssm_state_size", "state_size"), _size(text, "conv_kernel")
    return _ssm(layers, inner, _size(text, "n_groups"), size, kernel)


def _nemotron(text: Config, layers: int) -> StateShape:
    inner = _size(text, "mamba_num_heads") * _size(text, "mamba_head_dim")
    size, kernel = _size(text, "ssm_state_size"), _size(text, "conv_kernel")
    return _ssm(layers, inner, _size(text, "n_groups"), size, kernel)


def _granite(text: Config, layers: int) -> StateShape:
    inner = _size(text, "mamba_n_heads") * _size(text, "mamba_d_head")
    size, kernel = _size(text, "mamba_d_state"), _size(text, "mamba_d_conv")
    return _ssm(layers, inner, _size(text, "mamba_n_groups"), size, kernel)


def _short_convolution(text: Config, layers: int) -> StateShape:
    return StateShape(layers=layers, numbers=(_size(text, "conv_L_cache") - 1) * _size(text, "hidden_size"))


_LINEAR = {"full_attention": "A", "linear_attention": "S"}
_NEMOTRON = {"*": "A", "M": "S", "E": "-", "-": "-", "moe": "-", "mlp": "-", "conv": "S"}
_MAMBA = {"attention": "A", "mamba": "S"}
_RECURRENT: dict[str, tuple[Callable[[Config], Counts], Callable[[Config, int], StateShape]]] = {
    "falcon_h1": (_both, _granite),
    "granitemoehybrid": (_by_layer(_MAMBA), _granite),
    "lfm2": (_short_layers, _short_convolution),
    "lfm2_moe": (_short_layers, _short_convolution),
    "mamba2": (_state_alone, _mamba2),
    "nemotron_h": (_by_layer(_NEMOTRON | _MAMBA | _LINEAR), _nemotron),
    "olmo_hybrid": (_by_layer(_LINEAR), _gated_delta),
    "qwen3_5": (_by_interval, _gated_delta),
    "qwen3_5_moe": (_by_interval, _gated_delta),
    "qwen3_next": (_by_interval, _gated_delta),
}
