"""The arithmetic of quality against figures worked out by hand, and what is said of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ferrum_mlx.bench import weights
from ferrum_mlx.bench.weights import Quality, quality


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    """From probabilities."""
    return np.log(np.array([*rows, rows[-1]], dtype=np.float32)) + 3  # a shift changes no distribution


def test_quality_is_what_the_definitions_say() -> None:
    reference = logits((0.5, 0.25, 0.25), (0.2, 0.2, 0.6))
    ours = logits((0.25, 0.5, 0.25), (0.2, 0.2, 0.6))
    found = quality(ours, reference, [2, 0, 2])
    nll, before = -(math.log(0.25) + math.log(0.6)) / 2, -(math.log(0.5) + math.log(0.6)) / 2
    kl = (0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)) / 2
    wanted = Quality(nll, nll / before - 1, kl, 0.5)
    assert vars_of(found) == pytest.approx(vars_of(wanted), rel=1e-5)


def vars_of(one: Quality) -> list[float]:
    return [one.nll, one.rise, one.kl, one.top1]


def test_a_long_text_is_added_up_whole() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(151, 20)).astype(np.float32)
    ids = rng.integers(20, size=151).tolist()
    same = quality(reference, reference, ids)
    p = np.exp(reference.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    assert same.nll == pytest.approx(-np.log(p[np.arange(150), ids[1:]]).mean())
    assert (same.rise, same.kl, same.top1) == (0, 0, 1)


@pytest.mark.parametrize(("rise", "verdict"), [(0.009, "within 1%"), (0.011, "ABOVE 1%")])
def test_the_worse_of_both_ways_counts(rise: float, verdict: str) -> None:
    good, other = Quality(2.0, 0.0, 0.0, 1.0), Quality(2.0, rise, 0.0, 1.0)
    assert weights.line("int8", 10**8, good, other).endswith(verdict)
    assert weights.line("int8", 10**8, other, good).endswith(verdict)
