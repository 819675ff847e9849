"""Bytes of memory that a model's weights take, by what the headers of its files say, or its card."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ferrum_mlx import checkpoint
from ferrum_mlx.catalog import Card, Source
from ferrum_mlx.packing import Packing, packing_of

if TYPE_CHECKING:
    from ferrum_mlx.gguf import GGUFFile

# How weights are kept: by MLX on Metal and on a CPU; by torch packed and in float32 on a CPU, and on a GPU.
Route = Literal["metal", "mlx-cpu", "packed", "float32", "gpu"]
FLOAT32_SHARE = 0.8  # of what is free may go to float32 weights, before they stay as they are stored
# Bytes a number of weights that are not here yet: 16 bits; 4 bits with a scale and a bias of 16 bits for 64;
# Q4_K_M on average.
_STORED = {"safetensors": 2.0, "mlx-4bit": 4.5 / 8, "gguf": 4.85 / 8}
_K_QUANTS_BITS = 6 * 5 / 6 + 32 / 6  # of Q4_K_M on Metal: a sixth of it is no Q4_K
AFFINE_BITS = {"Q4_0": 6, "Q4_1": 6, "Q4_K": 6, "Q8_0": 10}  # on Metal: a scale and a bias of 32 bits for 32
# At the peak of packing a GGUF on a CPU (bench/NOTES.md), bytes a number: of a Linear layer, whose 4-bit
# codes are kept twice with their scales, or 8-bit ones once; of the table, in float32 when it is read, then
# in 16 bits, and in 8 as the head; of a model whose table is not known yet.
_PACKED_BYTES, _TABLE_BYTES, _PACKED_UNSEEN = 1.125, 7, 2
_EXPERTS = re.compile(r"(?<!shared_)experts\.")  # one tensor of all in transformers, and so no Linear layer
_INTEGER_BITS = {"U8": 8, "I32": 32, "U32": 32, "I64": 64}  # of the types that packed codes come in
_NUMBER_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclass(frozen=True, slots=True)
class Weights:
    """What is known of a model's weights.

    Attributes:
        values: numbers, unpacked.
        nbytes: in the files.
        is_gguf: a GGUF file's are unpacked when they are read, unless Metal multiplies with their codes.
        on_mlx: bytes on Metal, and on a CPU without room for float32.
        on_torch: bytes on a CPU without room for float32.
        packed: bytes at the peak of packing them on a CPU.
        wide: what of them is no code is in float32, and so are the model's keys and values.
    """

    values: int
    nbytes: int
    is_gguf: bool
    on_mlx: int
    on_torch: int
    packed: int
    wide: bool = False

    def kept(self, route: Route, free: int) -> int:
        """Bytes of memory that loading them takes at its peak, which is measured in bench/NOTES.md."""
        if route == "metal":
            return self.on_mlx
        if route == "gpu":
            return 2 * self.values
        if route == "packed":
            return self.packed
        if self._in_float32(free):
            return 4 * self.values
        return self.on_mlx if route == "mlx-cpu" else self.on_torch

    def number_bytes(self, route: Route, free: int) -> int:
        """Of a number that the model computes with: of its keys and values, and of a state."""
        if route == "gpu" or (route == "packed" and find_spec("numba")):  # whose kernel reads float16
            return 2
        in_float32 = route == "packed" or self.wide or (route != "metal" and self._in_float32(free))
        return 4 if in_float32 else 2

    def _in_float32(self, free: int) -> bool:
        return self.is_gguf or 4 * self.values <= FLOAT32_SHARE * free


def weights_of(path: Path, card: Card | None = None) -> Weights:
    """Of a model's files, by their headers.

    Raises:
        ModelFileError: a file that is not sound.
    """
    if path.is_file():
        from ferrum_mlx.gguf import GGUFFile

        return of_gguf(GGUFFile(path))
    return of_folder(path, card)


def of_folder(path: Path, card: Card | None) -> Weights:
    """Codes that are packed into integers are told by the config."""
    packing = packing_of(checkpoint.read_json(path / "config.json"))
    tensors = checkpoint.stored(path)  # it checks the files
    counted = {name: _unpacked(tensor, packing) for name, tensor in tensors.items()}
    values = (card.parameters if card else None) or sum(counted.values())
    nbytes = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    plain = [(each.dtype, math.prod(each.shape)) for each in tensors.values() if each.dtype in _NUMBER_BITS]
    wide = 2 * sum(count for dtype, count in plain if dtype == "F32") > sum(count for _, count in plain)
    experts = {name for name in tensors if _EXPERTS.search(name)}
    others = sum(_bytes(each) for name, each in tensors.items() if name not in experts)
    return Weights(
        values=values,
        nbytes=nbytes,
        is_gguf=False,
        on_mlx=2 * values if packing and packing.unpacked_by("mlx") else nbytes,
        on_torch=2 * values if packing and packing.unpacked_by("torch") else nbytes,
        packed=max(nbytes, others + 4 * sum(counted[name] for name in experts)),
        wide=wide,
    )


def of_gguf(gguf: GGUFFile) -> Weights:
    tensors = gguf.tensors
    values = sum(math.prod(each.shape) for each in tensors.values())
    nbytes = sum(each.nbytes for each in tensors.values())
    on_metal = sum(math.prod(each.shape) * AFFINE_BITS.get(each.type, 32) // 8 for each in tensors.values())
    table = math.prod(tensors["token_embd.weight"].shape) if "token_embd.weight" in tensors else 0
    packed = int(_PACKED_BYTES * (values - table)) + _TABLE_BYTES * table
    return Weights(values, nbytes, True, on_metal, nbytes, packed, wide=True)


def of_source(card: Card, source: Source) -> Weights | None:
    """Of a model that is not here yet; None where the card does not say how many there are."""
    if (values := card.parameters) is None:
        return None
    nbytes = source.size or int(values * _STORED[source.variant])
    if source.format == "safetensors":
        return Weights(values, nbytes, False, nbytes, nbytes, packed=nbytes + 2 * (card.experts or 0))
    on_metal = int(values * _K_QUANTS_BITS / 8)
    return Weights(values, nbytes, True, on_metal, nbytes, _PACKED_UNSEEN * values, wide=True)


def _unpacked(tensor: checkpoint.Tensor, packing: Packing | None) -> int:
    count, width = math.prod(tensor.shape), _INTEGER_BITS.get(tensor.dtype)
    bits = packing.bits if packing else None
    return count * width // bits if bits and width else count


def _bytes(tensor: checkpoint.Tensor) -> int:
    bits = _NUMBER_BITS.get(tensor.dtype) or _INTEGER_BITS.get(tensor.dtype, 8)
    return math.prod(tensor.shape) * bits // 8
