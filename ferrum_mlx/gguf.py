"""GGUF files: metadata, tensor directory and tensor values, with every length checked before it is used.

Knows the container, no model and no array library but numpy. All values are little-endian; a quantized
tensor is a run of blocks of 32 values along its last axis.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrum_mlx.errors import ModelFileError, UnsupportedModelError

BLOCK = 32  # values a quantization block
MAX_HEADER_BYTES = 64 << 20  # the largest known vocabularies need about 15 MB
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 10

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip

# ggml type number -> name, values a block, bytes a block
SUPPORTED_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", BLOCK, 18), 3: ("Q4_1", BLOCK, 20),
    8: ("Q8_0", BLOCK, 34),
}  # fmt: skip
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the directory.

    Attributes:
        name: the tensor's name in the file.
        shape: row-major, the contiguous axis last.
        type: F32, F16, Q4_0, Q4_1 or Q8_0.
        offset: of its first byte, from the start of the file.
        nbytes: bytes it takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """value = code * scale + bias, one scale and bias for each block of a row.

    Attributes:
        codes: uint8 [..., columns], below 2**bits.
        scales: float16 [..., columns // 32], as in the file.
        biases: float32 [..., columns // 32], exact.
        bits: 4 or 8.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    biases: NDArray[np.float32]
    bits: int


class GGUFFile:
    """A GGUF file of version 2 or 3, its header read and checked; tensor values are read on demand.

    Attributes:
        metadata: key -> str, int, float, bool, list of str, or a numpy array of numbers.
        tensors: name -> GGUFTensor, in file order.

    Raises:
        ModelFileError: no such file, or it is truncated, altered or not GGUF.
        UnsupportedModelError: a tensor is of a type other than F32, F16, Q4_0, Q4_1, Q8_0.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFileError(f"cannot read {self.path}: {error}") from error
        header = _HeaderReader(self._data, self.path)
        n_tensors, n_pairs = header.preamble()
        self.metadata: dict[str, Any] = header.pairs(n_pairs)
        if (parts := self.get("split.count", int, 0)) > 1:
            raise UnsupportedModelError(
                f"{self.path} is one of {parts} parts",
                "supported in GGUF: a model in one file",
                "join them with llama-gguf-split --merge",
            )
        self.tensors = header.directory(n_tensors, self.get("general.alignment", int, 32))

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, which must be of type `kind`; a missing key without a default is an error."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: the metadata has no {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileError(f"{self.path}: {key} is of type {type(value).__name__}, not {kind.__name__}")
        return value

    @np.errstate(invalid="ignore")  # NaN in a damaged file: the check at load says so
    def read(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor as float32, in its shape; exact, but for one rounding in Q4_1's sum."""
        tensor = self.tensors[name]
        if tensor.type in ("F32", "F16"):
            raw = self._bytes(tensor).view("<f4" if tensor.type == "F32" else "<f2")
            return raw.astype(np.float32).reshape(tensor.shape)
        quantized = self.read_quantized(name)
        blocks = quantized.codes.reshape(-1, BLOCK).astype(np.float32)
        blocks *= quantized.scales.reshape(-1, 1).astype(np.float32)
        blocks += quantized.biases.reshape(-1, 1)
        return blocks.reshape(tensor.shape)

    @np.errstate(invalid="ignore")
    def read_quantized(self, name: str) -> QuantizedTensor:
        """Codes, scales and biases of a Q4_0, Q4_1 or Q8_0 tensor."""
        tensor = self.tensors[name]
        _, _, block_bytes = _by_name(tensor.type)
        blocks = self._bytes(tensor).reshape(-1, block_bytes)
        scales = blocks[:, :2].copy().view("<f2")
        if tensor.type == "Q8_0":
            codes, bits = blocks[:, 2:] ^ np.uint8(128), 8  # int8 -> code - 128
            biases = scales.astype(np.float32) * -128
        else:
            packed, bits = blocks[:, -16:], 4
            codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
            is_q4_1 = tensor.type == "Q4_1"
            stored = blocks[:, 2:4].copy().view("<f2") if is_q4_1 else scales
            biases = stored.astype(np.float32) * (1 if is_q4_1 else -8)
        per_block = (*tensor.shape[:-1], tensor.shape[-1] // BLOCK)
        return QuantizedTensor(
            codes.reshape(tensor.shape), scales.reshape(per_block), biases.reshape(per_block), bits
        )

    def _bytes(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)


def _by_name(type_name: str) -> tuple[str, int, int]:
    return next(entry for entry in SUPPORTED_TYPES.values() if entry[0] == type_name)


class _HeaderReader:
    """Reads forward through the header; no read passes the end of the file or MAX_HEADER_BYTES."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0
        self.limit = min(self.size, MAX_HEADER_BYTES)

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is not a sound GGUF file: {what}", next_step="download it again or choose another"
        )

    def take(self, n_bytes: int) -> int:
        """Start of the next n_bytes, after a check that they exist."""
        start, end = self.at, self.at + n_bytes
        if end > self.limit:
            where = "the file" if self.limit == self.size else "the largest header that is read"
            raise self.fail(f"{n_bytes} bytes are needed at byte {start}, {where} ends at {self.limit}")
        self.at = end
        return start

    def scalar(self, fmt: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"the text at byte {start} is not UTF-8") from error

    def preamble(self) -> tuple[int, int]:
        """Number of tensors, number of metadata pairs."""
        magic = self.data[self.take(4) : self.at]
        if magic != b"GGUF":
            raise self.fail(f"it starts with {magic!r}, not b'GGUF'")
        version = self.scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}", "versions 2 and 3, little-endian, are supported"
            )
        return self.scalar("<Q"), self.scalar("<Q")

    def pairs(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in metadata:
                raise self.fail(f"metadata key {key!r:.80} comes twice")
            metadata[key] = self.value(self.scalar("<I"))
        return metadata

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"unknown metadata type {kind} at byte {self.at}")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element == _STRING:
            if count * 8 > self.limit - self.at:  # each text has a length of eight bytes
                raise self.fail(f"a list of {count} texts does not fit behind byte {self.at}")
            return [self.string() for _ in range(count)]
        if element not in _DTYPES:
            raise self.fail(f"unknown or nested array type {element} at byte {self.at}")
        dtype = np.dtype(_DTYPES[element])
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.at], dtype)

    def directory(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        if alignment < 8 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment}, not a power of two of at least 8")
        entries = [self.entry() for _ in range(count)]  # a count too large runs into the limit
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        free_from = base  # tensors lie in order; an overlap would multiply memory
        for entry in entries:
            start = base + entry.offset
            if entry.offset % alignment or start < free_from or entry.name in tensors:
                raise self.fail(f"tensor {entry.name!r} overlaps another, is misaligned or comes twice")
            free_from = start + entry.nbytes
            if free_from > self.size:
                raise self.fail(f"tensor {entry.name!r} ends at byte {free_from}, the file at {self.size}")
            tensors[entry.name] = GGUFTensor(entry.name, entry.shape, entry.type, start, entry.nbytes)
        return tensors

    def entry(self) -> GGUFTensor:
        """One directory entry, its offset still relative to the data section."""
        name = self.string()
        n_dims = self.scalar("<I")
        if not 1 <= n_dims <= MAX_DIMS or len(name) > MAX_NAME_BYTES:
            raise self.fail(f"tensor {name!r:.80} has {n_dims} dimensions")
        axes = [self.scalar("<Q") for _ in range(n_dims)]  # the contiguous axis first
        shape = tuple(reversed(axes))
        kind, offset = self.scalar("<I"), self.scalar("<Q")
        if kind not in SUPPORTED_TYPES:
            supported = ", ".join(entry[0] for entry in SUPPORTED_TYPES.values())
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is {_OTHER_TYPES.get(kind, f'of ggml type {kind}')}",
                f"supported GGUF types: {supported}",
                "take a file of these types, or the model's safetensors folder",
            )
        type_name, per_block, block_bytes = SUPPORTED_TYPES[kind]
        if 0 in shape or shape[-1] % per_block:
            raise self.fail(f"tensor {name!r} of type {type_name} has shape {shape}")
        return GGUFTensor(name, shape, type_name, offset, math.prod(shape) // per_block * block_bytes)
