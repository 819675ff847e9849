"""The rule of ferrum_mlx.nearties, with what it finds printed into the test's report."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_mlx import nearties
from ferrum_mlx.nearties import Fault, Logits, NearTie, faults

__all__ = ["compare", "faults"]


def compare(
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    our_logits: Logits,
    their_logits: Logits,
) -> NearTie | Fault | None:
    found = nearties.compare(prompt, ours, theirs, our_logits, their_logits)
    if found is not None:
        print(found)
    return found
