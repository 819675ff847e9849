"""A GGUF file in the terms of a Hugging Face checkpoint: a config, and weights by the checkpoint's names.

Read once, here, for every backend. What llama.cpp's converter did to values is undone as they are read.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_mlx import checkpoint
from ferrum_mlx.errors import ModelFileError, shown
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_config import hf_config
from ferrum_mlx.gguf_families import Family, family_of, module_names
from ferrum_mlx.gguf_quants import QuantizedTensor
from ferrum_mlx.gguf_rope import TABLES


class GGUFWeights:
    """The weights of a GGUF file that is open.

    Attributes:
        config: config.json-style, for model classes that know no GGUF.
        names: the weights, by the checkpoint's names.
        shapes: of the tensors as they are stored.

    Raises:
        UnsupportedModelError: a model of another architecture, or one that needs other arithmetic.
        ModelFileError: a file that is damaged, or contradicts itself.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._family = family_of(gguf)
        self.config: dict[str, Any] = hf_config(gguf)
        self.shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
        checkpoint.check_sizes(self.config, self.shapes, gguf.path)
        layers = self.config["num_hidden_layers"]
        self._tensors = {
            _weight_name(tensor, layers, gguf, self._family): tensor
            for tensor in gguf.tensors
            if tensor not in TABLES
        }

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def type_of(self, weight: str) -> str:
        """How a weight is stored, as ggml calls it."""
        return self._gguf.tensors[self._tensors[weight]].type

    def shape_of(self, weight: str) -> tuple[int, ...]:
        return self.shapes[self._tensors[weight]]

    def read(self, weight: str) -> NDArray[np.float32]:
        """A weight's values, exact, as float32."""
        values = self._gguf.read(self._tensors[weight])
        if weight.endswith("norm.weight") and self._family.norm_offset:
            values = values - np.float32(self._family.norm_offset)
        order = self._row_order(weight, len(values))
        return values if order is None else values[order]

    def read_quantized(self, weight: str) -> QuantizedTensor | None:
        """A weight's codes; None where it is not stored as codes with scales and biases."""
        stored = self._gguf.read_quantized(self._tensors[weight])
        if stored is None:
            return None
        order = self._row_order(weight, len(stored.codes))
        return stored if order is None else stored.rows(order)

    def _row_order(self, weight: str, rows: int) -> NDArray[np.intp] | None:
        """Rows of the tensor in the checkpoint's order; None where it is the same."""
        module = weight.rpartition(".")[0]
        if not self._family.interleaved or not module.endswith(("q_proj", "k_proj")):
            return None
        kind = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
        order = row_order(self.config[kind], self.config["head_dim"])
        if len(order) != rows:
            raise ModelFileError(f"{weight} has {rows} rows in the GGUF, its metadata asks for {len(order)}")
        return order


def row_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """[heads * head_dim]: where each row of a checkpoint's projection is among the interleaved ones."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _weight_name(tensor: str, num_layers: int, gguf: GGUFFile, family: Family) -> str:
    stem, _, kind = tensor.rpartition(".")
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", stem)
    layer = match[1] if match and int(match[1]) < num_layers else "0"
    names = module_names(gguf.get("general.architecture", str))
    known = names.get(f"blk.0.{match[2]}" if match else stem, "")
    module = known.removeprefix("model.layers.0.")
    fits = kind == "weight" or (kind == "bias" and module in family.biases)
    if not known or not fits or (match and layer != match[1]):
        raise ModelFileError(
            f"{gguf.path}: a {family.model_type} model of {num_layers} layers has no tensor {shown(tensor)}"
        )
    return f"model.layers.{layer}.{module}.{kind}" if match else f"{known}.{kind}"
