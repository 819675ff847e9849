"""The sampler against numpy: which tokens may come, how often, and on what the noise depends."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.sampler import sample
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.sampling import SamplingParams

mx.set_default_device(mx.cpu)
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=np.float32)


def draw(rows: list[RowSampling]) -> np.ndarray:
    return np.array(sample(mx.array(np.tile(LOGITS, (len(rows), 1))), rows))


def probabilities(temperature: float, keep: int) -> np.ndarray:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    weights[keep:] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"temperature": 1.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.8}, 3),  # 0.575 + 0.211 < 0.8 <= with the third
        ({"temperature": 1.0, "top_p": 0.55}, 1),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.74}, 2),  # renormalized: 0.731, then 1
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.72}, 1),
        ({"temperature": 1.0, "top_k": 100}, 6),
        ({"temperature": 2.0, "top_p": 0.5}, 2),  # temperature first: 0.405, 0.245
    ],
)
def test_frequencies_are_the_distribution_s(settings: dict[str, float], keep: int) -> None:
    count = 4000
    drawn = draw([RowSampling(params=SamplingParams(**settings), seed=seed) for seed in range(count)])
    frequencies = np.bincount(drawn, minlength=6) / count
    wanted = probabilities(settings["temperature"], keep)
    assert frequencies[keep:].sum() == 0
    bound = 0.5 * np.sqrt(2 * (6 * np.log(2) + np.log(1000)) / count)  # Bretagnolle–Huber–Carol, 99.9 %
    assert 0.5 * np.abs(frequencies - wanted).sum() < bound
    biased = probabilities(settings["temperature"] * 0.6, 6)  # negative control: the bound can tell
    if keep == 6:
        assert 0.5 * np.abs(frequencies - biased).sum() > bound


def test_noise_depends_on_seed_index_and_position_alone() -> None:
    names = itertools.product((0, 1), (0, 1), range(8))
    rows = [
        RowSampling(params=SamplingParams(temperature=1.0), seed=s, sample_index=i, position=p)
        for s, i, p in names
    ]
    together = draw(rows)
    assert [int(draw([row])[0]) for row in rows] == together.tolist()
    assert draw(rows[::-1])[::-1].tolist() == together.tolist()
    streams = together.reshape(4, 8).tolist()
    assert len({tuple(s) for s in streams}) == 4


def test_greedy_rows_stay_greedy_among_hot_ones() -> None:
    hot = RowSampling(params=SamplingParams(temperature=50.0), seed=1)
    assert draw([RowSampling(), hot, RowSampling()])[[0, 2]].tolist() == [0, 0]


def test_the_smallest_temperatures_are_greedy() -> None:
    assert draw(
        [RowSampling(params=SamplingParams(temperature=t), seed=3) for t in (1e-40, 1e-9, 9e-6)]
    ).tolist() == [0, 0, 0]


def test_tiny_top_p_is_greedy_and_ties_stay() -> None:
    assert set(
        draw(
            [RowSampling(params=SamplingParams(temperature=5.0, top_p=1e-9), seed=s) for s in range(50)]
        ).tolist()
    ) == {0}
    ties = mx.zeros((200, 4))
    rows = [RowSampling(params=SamplingParams(temperature=1.0, top_k=1), seed=s) for s in range(200)]
    assert set(np.array(sample(ties, rows)).tolist()) == {0, 1, 2, 3}
