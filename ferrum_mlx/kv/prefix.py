"""Keys by which full blocks are found again: a chain of hashes over tokens, and the tokens themselves."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class BlockKey(NamedTuple):
    """digest = hash(content); content = the parent's digest and the block's tokens, to be compared."""

    digest: bytes
    content: bytes


def root(*salt: str) -> bytes:
    """The digest before the first block. KV of another model, revision, dtype or adapter must not match."""
    return _hash("\0".join(salt).encode())


def block_key(parent: bytes, tokens: Sequence[int]) -> BlockKey:
    content = parent + array("i", tokens).tobytes()
    return BlockKey(_hash(content), content)


def block_keys(parent: bytes, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    """The keys of every full block of `tokens`, which begin behind `parent`."""
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        keys.append(block_key(parent, tokens[start : start + block_size]))
        parent = keys[-1].digest
    return keys


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
