"""Metadata of a GGUF's architecture, checked as it is read: it decides what is allocated and computed."""

from __future__ import annotations

import math

from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, shown
from ferrum_mlx.gguf import GGUFFile


class Values:
    """Keys are without the architecture in front.

    Every method raises ModelFileError for a value that is missing, of another kind or out of bounds.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf, self.path = gguf, gguf.path
        self._architecture = gguf.get("general.architecture", str)

    def has(self, key: str) -> bool:
        return self.gguf.has(self._full(key))

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        value = self.gguf.get(self._full(key), int, default)
        if not 1 <= value < 2**31:
            raise self.wrong(
                f"{self._full(key)} is {value}", "a whole number from 1 to 2,147,483,647 is expected"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.gguf.get(self._full(key), float, default)
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(f"{self._full(key)} is {value}", "a positive number is expected")
        return value

    def text(self, key: str, default: str) -> str:
        return self.gguf.get(self._full(key), str, default)

    def must_be(self, key: str, right: float) -> None:
        """Refuse what would need other arithmetic.

        Raises:
            UnsupportedModelError: the key is there with another value.
            ModelFileError: it is there with a value of another type.
        """
        value = self.gguf.get(self._full(key), type(right), right)
        if value != right:
            raise UnsupportedModelError(
                f"{self.path}: {self._full(key)} is {shown(value)}", f"supported in GGUF: {right}"
            )

    def wrong(self, what: str, allowed: str = "") -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}", allowed)

    def _full(self, key: str) -> str:
        return f"{self._architecture}.{key}"
