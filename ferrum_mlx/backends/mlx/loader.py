"""Models into mlx-lm's own classes: safetensors folders, and GGUFs from their tensors."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from ferrum_mlx import checkpoint
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, one_line, shown
from ferrum_mlx.gguf_quants import GROUP, QuantizedTensor
from ferrum_mlx.gguf_weights import GGUFWeights
from ferrum_mlx.packing import check_packing


def load_model(resolved: ResolvedModel, *, quantized: bool = False) -> tuple[Module, dict[str, Any]]:
    """The model and its config.json as a dict; of a GGUF with "unpacked": bytes in float32 by ggml's types.

    Args:
        quantized: of a GGUF only: True keeps Q4_0, Q4_1, Q8_0 and Q4_K tensors packed, False unpacks them.
            Either way the values are exact and all else is float32. A safetensors folder is loaded as
            its config says.

    Raises:
        ModelFileError: files missing, truncated or not fitting the config.
        UnsupportedModelError: a model that mlx-lm, or our GGUF reader, has no class for.
    """
    if resolved.format == "gguf":
        return _load_gguf(resolved, quantized)
    return _load_folder(resolved.path)


def _load_folder(folder: Path) -> tuple[Module, dict[str, Any]]:
    from mlx_lm.utils import load_model as load_mlx_lm

    checkpoint.check_folder(folder)  # mlx reads lazily: a fault would show in the middle of a forward
    config = checkpoint.read_json(folder / "config.json")
    check_packing(config, "mlx", folder)
    try:
        return load_mlx_lm(folder, lazy=True, strict=True, trust_remote_code=False)
    except (Exception, SystemExit) as error:  # the model classes raise what they like, or end the process
        reason = one_line(error)
        if "trust_remote_code" in reason:
            raise UnsupportedModelError(
                f"{folder} brings its own model code, which is never run", next_step="choose another model"
            ) from error
        if isinstance(error, SystemExit):  # olmo's does, with a line on stdout
            raise UnsupportedModelError(
                f"{folder}: mlx-lm's class for {shown(config['model_type'])} wants a package besides",
                next_step="take --backend torch, or choose another model",
            ) from error
        if any(words in reason for words in ("not supported", "custom module", "has no attribute 'Model'")):
            raise UnsupportedModelError(f"{folder}: {reason}", "see mlx-lm's list of model types") from error
        raise ModelFileError(
            f"{folder} cannot be loaded: {reason}", next_step="get the model again"
        ) from error


def _load_gguf(resolved: ResolvedModel, quantized: bool) -> tuple[Module, dict[str, Any]]:
    gguf = GGUFWeights(resolved.gguf)
    config = gguf.config
    classes = import_module(f"mlx_lm.models.{config['model_type']}")
    model = classes.Model(classes.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    bits_of: dict[str, int] = {}
    unpacked: dict[str, int] = {}
    for weight in gguf.names:
        stored = gguf.read_quantized(weight) if quantized else None
        if stored is None:
            weights[weight] = mx.array(gguf.read(weight))
            kind = gguf.type_of(weight)
            unpacked[kind] = unpacked.get(kind, 0) + weights[weight].nbytes
        else:
            layer = weight.removesuffix(".weight")
            bits_of[layer] = stored.bits
            weights |= {f"{layer}.{part}": array for part, array in affine(stored).items()}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    config["unpacked"] = {kind: nbytes for kind, nbytes in unpacked.items() if kind != "F32"}
    try:
        if bits_of:
            config["quantization"] = {"group_size": GROUP, "bits": min(bits_of.values())}
            quantize(
                model,
                group_size=GROUP,
                class_predicate=lambda layer, _: (
                    {"group_size": GROUP, "bits": bits_of[layer]} if layer in bits_of else False
                ),
            )
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelFileError(
            f"{resolved.path} does not fit its own metadata: {str(error).splitlines()[0]}"
        ) from error
    return model, config


def affine(stored: QuantizedTensor) -> dict[str, mx.array]:
    """Weight, scales and biases as mlx's affine mode has them: codes packed low bits first."""
    codes = stored.codes
    if stored.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return {
        "weight": mx.array(np.ascontiguousarray(codes).view("<u4")),
        "scales": mx.array(stored.scales.astype(np.float32)),
        "biases": mx.array(stored.biases),
    }
