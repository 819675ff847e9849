"""Keys and values in fewer bits: groups of GROUP numbers along a head, each with a scale and a bias.

A number is code · scale + bias. Scales and biases have the model's own dtype. A head that is no multiple of
GROUP is filled up with zeros. What is kept of a token follows from its own K and V alone, so that it does
not matter with whom, in which chunk, or how often a token is computed.
"""

from __future__ import annotations

GROUP = 32  # the smallest that MLX packs; bench/NOTES.md has what larger ones cost
# Share by which the NLL of a text may part from the model's.
LIKELIHOOD_BOUNDS = {"float16": 0.002, "int8": 0.01, "int4": 0.05}


def name_of(bits: int | None) -> str:
    """As a dtype; "" where K and V have the model's own."""
    return f"int{bits}" if bits else ""


def is_quantized(kv_dtype: str) -> bool:
    """Of ModelInfo.kv_dtype: codes are kept, not the numbers in fewer bits."""
    return kv_dtype.startswith("int")


def groups_of(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def head_bytes(head_dim: int, bits: int | None, itemsize: int) -> int:
    """What one head keeps of a token's K, or of its V.

    Args:
        itemsize: bytes of a number in the model's own dtype.
    """
    if bits is None:
        return head_dim * itemsize
    return groups_of(head_dim) * (GROUP * bits // 8 + 2 * itemsize)
