"""GGUF files: metadata, tensor directory and tensor values, with every length checked before it is used.

Knows the container, no model and no array library but numpy. All values are little-endian.
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

from ferrum_mlx import gguf_quants
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, shown
from ferrum_mlx.gguf_quants import QuantizedTensor

MAX_HEADER_BYTES = 64 << 20  # the largest known vocabularies need about 15 MB
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 10
_AGAIN = "download it again or choose another"

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip

T = TypeVar("T")
_WORDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false",
    list: "a list of texts", np.ndarray: "a list of numbers",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the directory.

    Attributes:
        name: the tensor's name in the file.
        shape: row-major, the contiguous axis last.
        type: its name in ggml, one of gguf_quants.READABLE.
        offset: of its first byte, from the start of the file.
        nbytes: bytes it takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file of version 2 or 3, its header read and checked; tensor values are read on demand.

    Attributes:
        metadata: key -> str, int, float, bool, list of str, or a numpy array of numbers; a stranger wrote it,
            so it is read by `get` and `find`, which check the type.
        tensors: name -> GGUFTensor, in file order.

    Raises:
        ModelFileError: no such file, or it is truncated, altered or not GGUF.
        UnsupportedModelError: a tensor is of a type that nothing here can read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():  # a pipe waits for ever
            raise ModelFileError(f"cannot read {self.path}: it is no file")
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
        value = self.find(key, kind)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.path}: the metadata has no {key}", next_step=_AGAIN)
        return value

    def has(self, key: str) -> bool:
        return key in self.metadata

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, which must be of type `kind`; None where the key is missing."""
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise ModelFileError(f"{self.path}: {key} is {shown(value)}", f"{_WORDS[kind]} is expected", _AGAIN)

    def read(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor as float32, in its shape, as the gguf package reads them."""
        tensor = self.tensors[name]
        values = gguf_quants.values(tensor.type, self._bytes(tensor), tensor.shape)
        self._let_go()
        return values

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """Codes, scales and biases of a Q4_0, Q4_1, Q8_0 or Q4_K tensor; None for another type."""
        tensor = self.tensors[name]
        codes = gguf_quants.codes(tensor.type, self._bytes(tensor), tensor.shape)
        self._let_go()
        return codes

    def _let_go(self) -> None:
        """Pages of the file that have been read would count as this process's memory while it loads."""
        self._data.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)


class _HeaderReader:
    """Reads forward through the header; no read passes the end of the file or MAX_HEADER_BYTES."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0
        self.limit = min(self.size, MAX_HEADER_BYTES)

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a sound GGUF file: {what}", next_step=_AGAIN)

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
        found = gguf_quants.kinds().get(kind)
        if found is None or found.name not in gguf_quants.READABLE:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown(name)} is {found.name if found else f'of ggml type {kind}'}",
                f"supported GGUF types: {', '.join(gguf_quants.READABLE)}",
                "take a file of these types, or the model's safetensors folder",
            )
        type_name, per_block, block_bytes = found
        if 0 in shape or shape[-1] % per_block:
            raise self.fail(f"tensor {name!r} of type {type_name} has shape {shape}")
        return GGUFTensor(name, shape, type_name, offset, math.prod(shape) // per_block * block_bytes)
