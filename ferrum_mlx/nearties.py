"""When two systems' greedy ids differ: a near-tie, which rounding may decide, or a fault.

A near-tie, in float32: on the reference's logits at the first step that differs, the two ids are closer
than min(2 · delta, 1e-3), where delta is the largest difference of the two systems' logits there. A
delta above 1e-3 is a fault whatever the ids; so are near-ties in more than one prompt of ten. Sixteen
bits round more coarsely: there the limit is a share of the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LIMIT = 1e-3
# Of the largest logit. A code of quantized KV that rounding turns over moves a number by a whole step, and
# layer by layer more of them: two routes end up as far apart as quantizing takes them (bench/NOTES.md).
ROUNDING = {"float16": 3e-2, "bfloat16": 1e-1, "int8": 5e-2, "int4": 2e-1}
# The same of a float32 model whose products alone are of bfloat16, computed twice by the same kernels: one
# unit in the last place of a logit that the head rounds the other way, and as much from the layers before.
SAME_PRODUCTS = 2.0**-6
Logits = Callable[[list[int]], np.ndarray]  # known ids → [vocab], the logits of the id behind them


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step whose ids differ; what follows it cannot be compared."""

    step: int
    ours: int
    theirs: int
    gap: float  # how far our id lies below theirs on the reference's logits
    delta: float  # largest difference of the two systems' logits

    def __str__(self) -> str:
        return (
            f"{type(self).__name__} at output {self.step}: ours {self.ours}, theirs {self.theirs}, "
            f"{self.gap:.3g} apart on the reference's logits, off ours by at most {self.delta:.3g}"
        )


class NearTie(Divergence):
    pass


class Fault(Divergence):
    pass


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference of two arrays of logits; NaN if either has one. Equal -inf, a ban, is none."""
    apart = ours != theirs
    return float(np.abs(ours[apart].astype(np.float64) - theirs[apart].astype(np.float64)).max(initial=0))


def tolerance(dtype: str) -> float:
    """What computing in `dtype` by another order may change, as a share of the largest logit."""
    return ROUNDING.get(dtype, LIMIT)


def limit(dtype: str, logits: np.ndarray) -> float:
    """Most that two systems' logits, computed in `dtype`, may differ by."""
    if dtype not in ROUNDING:
        return LIMIT
    return tolerance(dtype) * max(1.0, float(np.abs(logits[np.isfinite(logits)]).max(initial=0)))


def compare(
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    our_logits: Logits,
    their_logits: Logits,
    dtype: str = "float32",
) -> NearTie | Fault | None:
    """None if the outputs are equal; else the first divergence.

    Args:
        ours, theirs: output ids; theirs are the reference's.
        our_logits, their_logits: the logits behind given ids, asked for at most once.
        dtype: what the logits were computed in.

    Raises:
        ValueError: outputs of unequal length, which no near-tie explains.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"outputs of {len(ours)} and {len(theirs)} ids cannot be compared")
    for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        if mine != reference:
            known = [*prompt, *theirs[:step]]
            return _judge(step, mine, reference, our_logits(known), their_logits(known), dtype)
    return None


def _judge(
    step: int, ours: int, theirs: int, our_row: np.ndarray, their_row: np.ndarray, dtype: str
) -> NearTie | Fault:
    delta = difference(our_row, their_row)
    gap = float(their_row[theirs]) - float(their_row[ours])
    most = limit(dtype, their_row)
    tie = delta <= most and 0 <= gap < min(2 * delta, most)  # False for NaN
    return (NearTie if tie else Fault)(step, ours, theirs, gap, delta)


def faults(found: Sequence[NearTie | Fault | None]) -> list[str]:
    """What is wrong with a run of several prompts, one entry a prompt of `found`; empty if nothing is."""
    wrong = [f"prompt {i}: {entry}" for i, entry in enumerate(found) if isinstance(entry, Fault)]
    ties = sum(isinstance(entry, NearTie) for entry in found)
    if ties * 10 > len(found):
        wrong.append(f"{ties} near-ties in {len(found)} prompts; allowed: one in ten")
    return wrong
