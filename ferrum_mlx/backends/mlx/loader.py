"""Models into mlx-lm's own classes: safetensors folders, and Llama-family GGUFs from their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from numpy.typing import NDArray

from ferrum_mlx import checkpoint
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, one_line
from ferrum_mlx.gguf import BLOCK, GGUFFile
from ferrum_mlx.gguf_llama import hf_config, row_order, tensors_by_weight


def load_model(resolved: ResolvedModel, *, quantized: bool = False) -> tuple[Module, dict[str, Any]]:
    """The model and its config.json as a dict.

    Args:
        quantized: of a GGUF only: True keeps its 4- and 8-bit tensors packed, False unpacks them. Either way
            the values are exact and all else is float32. A safetensors folder is loaded as its config says.

    Raises:
        ModelFileError: files missing, truncated or not fitting the config.
        UnsupportedModelError: a model that mlx-lm, or our GGUF reader, has no class for.
    """
    if resolved.format == "gguf":
        return _load_gguf(resolved.path, quantized)
    return _load_folder(resolved.path)


def _load_folder(folder: Path) -> tuple[Module, dict[str, Any]]:
    from mlx_lm.utils import load_model as load_mlx_lm

    checkpoint.check_folder(folder)  # mlx reads lazily: a fault would show in the middle of a forward
    try:
        return load_mlx_lm(folder, lazy=True, strict=True, trust_remote_code=False)
    except Exception as error:  # the model classes raise what they like over a bad config
        reason = one_line(error)
        if "trust_remote_code" in reason:
            raise UnsupportedModelError(
                f"{folder} brings its own model code, which is never run", next_step="choose another model"
            ) from error
        if "not supported" in reason or "custom module" in reason:
            raise UnsupportedModelError(f"{folder}: {reason}", "see mlx-lm's list of model types") from error
        raise ModelFileError(
            f"{folder} cannot be loaded: {reason}", next_step="get the model again"
        ) from error


def _load_gguf(path: Path, quantized: bool) -> tuple[Module, dict[str, Any]]:
    from mlx_lm.models.llama import Model, ModelArgs

    gguf = GGUFFile(path)
    config = hf_config(gguf)
    checkpoint.check_sizes(config, {name: tensor.shape for name, tensor in gguf.tensors.items()}, path)
    model = Model(ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    bits_of: dict[str, int] = {}
    for weight, tensor in tensors_by_weight(gguf, config).items():
        layer = weight.removesuffix(".weight")
        rows = row_order(tensor, config)
        if quantized and gguf.tensors[tensor].type.startswith("Q"):
            bits_of[layer], arrays = _packed(gguf, tensor, rows)
            weights |= {f"{layer}.{part}": array for part, array in arrays.items()}
        else:
            weights[weight] = mx.array(_reordered(gguf.read(tensor), rows, tensor))
    if bits_of:
        config["quantization"] = {"group_size": BLOCK, "bits": min(bits_of.values())}
        quantize(
            model,
            group_size=BLOCK,
            class_predicate=lambda layer, _: (
                {"group_size": BLOCK, "bits": bits_of[layer]} if layer in bits_of else False
            ),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelFileError(f"{path} does not fit its own metadata: {str(error).splitlines()[0]}") from error
    return model, config


def _packed(gguf: GGUFFile, tensor: str, rows: NDArray[np.intp] | None) -> tuple[int, dict[str, mx.array]]:
    """Bits, and weight, scales and biases as mlx's affine mode has them: codes packed low bits first."""
    quantized = gguf.read_quantized(tensor)
    codes = _reordered(quantized.codes, rows, tensor)
    if quantized.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    scales, biases = (
        _reordered(part, rows, tensor).astype(np.float32) for part in (quantized.scales, quantized.biases)
    )
    arrays = {"weight": np.ascontiguousarray(codes).view("<u4"), "scales": scales, "biases": biases}
    return quantized.bits, {part: mx.array(array) for part, array in arrays.items()}


def _reordered(values: NDArray[Any], rows: NDArray[np.intp] | None, tensor: str) -> NDArray[Any]:
    if rows is None:
        return values
    if len(rows) != len(values):
        raise ModelFileError(f"tensor {tensor!r} has {len(values)} rows, the metadata asks for {len(rows)}")
    return values[rows]
