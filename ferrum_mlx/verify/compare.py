"""Two runs of the same requests: how far apart, and whether that is rounding or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ferrum_mlx import nearties
from ferrum_mlx.nearties import Divergence, Fault, NearTie
from ferrum_mlx.verify.runs import Output

EXACT, EQUAL, NEAR_TIE, ROUNDING = "exact", "equal ids", "near-tie", "rounding"
CONSISTENT, IN_PLACE, WITHIN = "consistent", "in place", "within its bound"
FAULT, REFUSED, NOT_APPLICABLE = "fault", "refused", "not applicable"


class Skipped(Exception):
    """A check that cannot run here: the outcome, and why."""

    def __init__(self, outcome: str, why: str) -> None:
        self.outcome, self.why = outcome, why
        super().__init__(outcome, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        outcome: one of the words above. "exact" is equal bits, and only said of --numerics exact; a
            near-tie is an id that rounding decided (nearties.py), in 16 bits simply "rounding".
        detail: what was seen, or why the check is refused or not applicable.
        largest_difference: of the logits at equal known ids.
        kl: mean of KL(reference || ours) over the tokens, in nats.
        top1: share of tokens whose likeliest id is the reference's.
        first: prompt and divergence where an id first differs.
    """

    outcome: str
    detail: str = ""
    largest_difference: float | None = None
    kl: float | None = None
    top1: float | None = None
    first: tuple[int, Divergence] | None = None
    check: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Comparison:
    """Adds up requests, ours beside the reference's.

    Args:
        dtype: what the model computes in.
        sampled: the ids were drawn with noise, which no near-tie explains.
    """

    dtype: str
    sampled: bool = False
    found: list[NearTie | Fault | None] = field(default_factory=list)
    largest: float = 0.0
    bitwise: bool = True
    _kl: float = 0.0
    _agreed: int = 0
    _rows: int = 0
    _wrong: list[str] = field(default_factory=list)

    def add(self, prompt: Sequence[int], ours: Output, theirs: Output) -> None:
        """Up to the first id that differs: behind it the known ids do."""
        number = len(self.found)
        lengths = {len(ours.ids), len(theirs.ids), len(ours.rows), len(theirs.rows)}
        if len(lengths) > 1:
            self._wrong.append(f"prompt {number}: {len(ours.ids)} tokens came instead of {len(theirs.ids)}")
            self.found.append(None)
            return
        divergence = self._diverge(prompt, ours, theirs)
        self.found.append(divergence)
        end = len(ours.ids) if divergence is None else divergence.step + 1
        for step in range(end):
            self._add_row(f"prompt {number}, output {step}", ours.rows[step], theirs.rows[step])

    def _diverge(self, prompt: Sequence[int], ours: Output, theirs: Output) -> NearTie | Fault | None:
        start = len(prompt)
        found = nearties.compare(
            prompt,
            ours.ids,
            theirs.ids,
            lambda known: ours.rows[len(known) - start],
            lambda known: theirs.rows[len(known) - start],
            self.dtype,
        )
        if found is not None and self.sampled:
            return Fault(found.step, found.ours, found.theirs, found.gap, found.delta)
        return found

    def _add_row(self, where: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        delta = nearties.difference(ours, theirs)
        most = nearties.limit(self.dtype, theirs)
        if not delta <= most:  # NaN, too
            self._wrong.append(f"{where}: logits differ by {delta:.3g}; allowed: {most:.3g}")
        self.largest = max(self.largest, delta) if delta == delta else delta
        self.bitwise = self.bitwise and np.array_equal(ours, theirs)
        self._kl += _divergence(theirs, ours)
        self._agreed += int(ours.argmax()) == int(theirs.argmax())
        self._rows += 1

    def row(self, *, exact: bool, detail: str = "") -> Row:
        """`exact`: --numerics exact was asked for."""
        outcome, why = self._outcome(exact)
        first = next(((i, d) for i, d in enumerate(self.found) if d is not None), None)
        return Row(
            outcome=outcome,
            detail="; ".join(filter(None, [why, detail])),
            largest_difference=self.largest,
            kl=self._kl / max(1, self._rows),
            top1=self._agreed / max(1, self._rows),
            first=first,
        )

    def _outcome(self, exact: bool) -> tuple[str, str]:
        coarse = self.dtype in nearties.ROUNDING
        apart = [f"prompt {i}: {d}" for i, d in enumerate(self.found) if d is not None]
        faults = [f"prompt {i}: {d}" for i, d in enumerate(self.found) if isinstance(d, Fault)]
        wrong = (faults if coarse else nearties.faults(self.found)) + self._wrong
        if wrong:
            return FAULT, _first_of(wrong)
        if apart:
            return (ROUNDING if coarse else NEAR_TIE), _first_of(apart)
        return (EXACT if exact and self.bitwise else EQUAL), ""


def _first_of(found: Sequence[str]) -> str:
    return found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else "")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[…, vocab] float64."""
    with np.errstate(invalid="ignore"):  # values that are not finite are found elsewhere
        shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _divergence(theirs: np.ndarray, ours: np.ndarray) -> float:
    """KL(theirs || ours) of two rows of logits, in nats."""
    p, q = log_softmax(theirs), log_softmax(ours)
    seen = p > -np.inf
    return float((np.exp(p[seen]) * (p[seen] - q[seen])).sum())
