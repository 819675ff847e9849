"""When two systems' greedy ids differ: a near-tie, which rounding may decide, or a fault.

A near-tie, in float32 only: on the reference's logits at the first step that differs, the two ids are
closer than min(2 · delta, 1e-3), where delta is the largest difference of the two systems' logits
there. A delta above 1e-3 is a fault whatever the ids; so are near-ties in more than one prompt of ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LIMIT = 1e-3
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


def compare(
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    our_logits: Logits,
    their_logits: Logits,
) -> NearTie | Fault | None:
    """None if the outputs are equal; else the first divergence, printed.

    Args:
        ours, theirs: output ids; theirs are the reference's.
        our_logits, their_logits: the logits behind given ids, asked for at most once.

    Raises:
        ValueError: outputs of unequal length, which no near-tie explains.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"outputs of {len(ours)} and {len(theirs)} ids cannot be compared")
    for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        if mine != reference:
            known = [*prompt, *theirs[:step]]
            found = _judge(step, mine, reference, our_logits(known), their_logits(known))
            print(found)
            return found
    return None


def _judge(step: int, ours: int, theirs: int, our_row: np.ndarray, their_row: np.ndarray) -> NearTie | Fault:
    delta = float(np.abs(our_row.astype(np.float64) - their_row.astype(np.float64)).max())
    gap = float(their_row[theirs]) - float(their_row[ours])
    tie = delta <= LIMIT and 0 <= gap < min(2 * delta, LIMIT)  # False for NaN
    return (NearTie if tie else Fault)(step, ours, theirs, gap, delta)


def faults(found: Sequence[NearTie | Fault | None]) -> list[str]:
    """What is wrong with a run of several prompts, one entry a prompt of `found`; empty if nothing is."""
    wrong = [f"prompt {i}: {entry}" for i, entry in enumerate(found) if isinstance(entry, Fault)]
    ties = sum(isinstance(entry, NearTie) for entry in found)
    if ties * 10 > len(found):
        wrong.append(f"{ties} near-ties in {len(found)} prompts; allowed: one in ten")
    return wrong
