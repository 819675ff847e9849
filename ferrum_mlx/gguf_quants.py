"""The quantizations of GGUF: which can be read, their values, and the codes of those that are affine.

A quantized tensor is a run of blocks along its last axis. Codes that backends can multiply with as they
are come out of here; all other types are unpacked by the gguf package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP = 32  # values that share a scale and a bias

READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)


class Kind(NamedTuple):
    """A tensor type: values and bytes a block."""

    name: str
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """value = code * scale + bias, one scale and bias for each group of 32 of a row.

    Attributes:
        codes: uint8 [..., columns], below 2**bits.
        scales: float16 or float32 [..., columns // 32], exact.
        biases: float32 [..., columns // 32], exact.
        bits: 4 or 8.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16] | NDArray[np.float32]
    biases: NDArray[np.float32]
    bits: int

    def rows(self, order: NDArray[np.intp]) -> QuantizedTensor:
        """The same with its rows in another order."""
        return QuantizedTensor(self.codes[order], self.scales[order], self.biases[order], self.bits)


@cache
def kinds() -> dict[int, Kind]:
    """ggml's number of every type the gguf package knows."""
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.value: Kind(kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}


@np.errstate(invalid="ignore", over="ignore")  # in a damaged file: the check at load says so
def values(kind: str, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor's values: float32 of that shape."""
    if kind in ("F32", "F16"):
        stored = raw.view("<f4" if kind == "F32" else "<f2")
        return stored.astype(np.float32).reshape(shape)
    from gguf import GGMLQuantizationType, dequantize

    rows = raw.reshape(math.prod(shape[:-1]), -1)
    unpacked: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[kind])
    return unpacked.reshape(shape)


@np.errstate(invalid="ignore", over="ignore")
def codes(kind: str, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> QuantizedTensor | None:
    """A tensor as codes with scales and biases; None if its type is not of that form."""
    if kind not in _AFFINE:
        return None
    found, scales, biases = _AFFINE[kind](raw)
    per_group = (*shape[:-1], shape[-1] // GROUP)
    bits = 8 if kind == "Q8_0" else 4
    return QuantizedTensor(found.reshape(shape), scales.reshape(per_group), biases.reshape(per_group), bits)


Parts = tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.float32]]  # codes, scales, biases


def _q8_0(raw: NDArray[np.uint8]) -> Parts:
    """A scale, 32 signed codes: q · d = (q + 128) · d - 128 · d."""
    blocks = raw.reshape(-1, 34)
    scales = _halves(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scales, scales.astype(np.float32) * -128


def _q4_0(raw: NDArray[np.uint8]) -> Parts:
    """A scale, 32 codes: (q - 8) · d."""
    blocks = raw.reshape(-1, 18)
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, scales.astype(np.float32) * -8


def _q4_1(raw: NDArray[np.uint8]) -> Parts:
    """A scale, a bias, 32 codes."""
    blocks = raw.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2).astype(np.float32)


def _q4_k(raw: NDArray[np.uint8]) -> Parts:
    """Eight groups: a scale of the scales, one of the biases, 6 bits each of both a group, the codes.

    Of the twelve bytes with 8 · 2 · 6 bits, the first four have the scales of groups 0 to 3 in their low six
    bits, the next four their biases; groups 4 to 7 have four bits in the last, the upper two in the first.
    """
    blocks = raw.reshape(-1, 144)
    low, high, mixed = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], axis=1)
    biases = np.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], axis=1)
    return (
        _nibbles(blocks[:, 16:].reshape(-1, 32)),
        _halves(blocks, 0).astype(np.float32) * scales,
        -(_halves(blocks, 2).astype(np.float32) * biases),
    )


_AFFINE: dict[str, Callable[[NDArray[np.uint8]], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}


def _halves(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float16]:
    """The float16 at that byte of every block, [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2")


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All low ones of a row, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
