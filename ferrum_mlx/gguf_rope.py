"""How a GGUF file says that rotary embeddings are scaled, in the terms of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_mlx.errors import UnsupportedModelError, shown
from ferrum_mlx.gguf_values import Values

# tables derived from the config, no weights of the model
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (FREQS, LONG, SHORT)

# of YaRN, with the one value that model classes compute
_YARN_MUST_BE = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.attn_factor": 1.0,
}


def rope_scaling(values: Values, rotated: int) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json; None for plain RoPE.

    Args:
        rotated: dimensions of a head that are rotated.

    Raises:
        UnsupportedModelError: a rule that is not known here.
        ModelFileError: its numbers are missing or none.
    """
    tensors = values.gguf.tensors
    if LONG in tensors or SHORT in tensors:
        return _longrope(values, rotated)
    if FREQS in tensors:
        return _llama3(values, rotated)
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        factor = values.positive("rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(values)
    raise UnsupportedModelError(
        f"{values.path}: RoPE scaling {shown(kind)}",
        "supported in GGUF: none, linear, yarn, and the tables of llama3 and longrope",
    )


def _yarn(values: Values) -> dict[str, Any]:
    for key, right in _YARN_MUST_BE.items():
        values.must_be(key, right)
    found = {
        "rope_type": "yarn",
        "factor": values.positive("rope.scaling.factor"),
        "original_max_position_embeddings": values.size("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if values.has(f"rope.scaling.yarn_{key}"):
            found[key] = values.positive(f"rope.scaling.yarn_{key}")
    return found


def _longrope(values: Values, rotated: int) -> dict[str, Any]:
    """A factor for each pair of dimensions, up to the original context and beyond."""
    factors = {
        key: _factors(values, name, rotated).tolist()
        for key, name in (("long_factor", LONG), ("short_factor", SHORT))
    }
    original = values.size("rope.scaling.original_context_length")
    stretch = values.size("context_length") / original
    gain = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    stored = values.positive("rope.scaling.attn_factor", gain)
    if not math.isclose(stored, gain, rel_tol=1e-4):
        raise UnsupportedModelError(
            f"{values.path}: rope.scaling.attn_factor is {stored}",
            f"supported in GGUF: {gain:.6f}, by longrope's rule",
        )
    kind = {"rope_type": "longrope", "type": "longrope"}  # mlx-lm's phi3 knows the old key alone
    return {**kind, **factors, "original_max_position_embeddings": original}


def _llama3(values: Values, rotated: int) -> dict[str, Any]:
    """The llama3 rule whose table the file stores: it keeps the factors, not the four numbers behind them."""
    stored = _factors(values, FREQS, rotated)
    rule = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = 8192
    base = values.positive("rope.freq_base", 10000.0)
    turns = original / (2 * math.pi * base ** (np.arange(0, rotated, 2) / rotated))
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    factors = 1 / ((1 - smooth) / rule["factor"] + smooth)
    if not np.allclose(stored, factors, rtol=1e-4):
        raise UnsupportedModelError(
            f"{values.path}: the table {FREQS} follows no rule we know", "supported in GGUF: the llama3 rule"
        )
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **rule}


def _factors(values: Values, name: str, rotated: int) -> NDArray[np.float32]:
    """[rotated // 2]: a table, of the size that the metadata says before anything else is made of that."""
    tensor = values.gguf.tensors.get(name)
    if tensor is None or tensor.shape != (rotated // 2,):
        shape = tensor.shape if tensor else None
        raise values.wrong(f"{name} has shape {shape}", f"({rotated // 2},) is expected")
    factors = values.gguf.read(name)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise values.wrong(f"{name} holds factors that are not positive numbers")
    return factors
