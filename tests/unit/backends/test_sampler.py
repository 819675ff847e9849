"""The sampler against numpy: which tokens may come, how often, and on what the noise depends."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx import processors
from ferrum_mlx.backends.mlx.sampler import sample
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.sampling import SamplingParams

mx.set_default_device(mx.cpu)
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=np.float32)
COUNT = 20_000
BOUND = 0.5 * np.sqrt(2 * (6 * np.log(2) + np.log(1000)) / COUNT)  # Bretagnolle–Huber–Carol, 99.9 %


def draw(rows: list[RowSampling], logits: np.ndarray = LOGITS) -> np.ndarray:
    return np.array(sample(mx.array(np.tile(logits, (len(rows), 1))), rows))


def frequencies(fields: dict[str, Any], **settings: Any) -> np.ndarray:
    """Of the six tokens, over many seeds."""
    params = SamplingParams(**settings)
    drawn = draw([RowSampling(params=params, seed=seed, **fields) for seed in range(COUNT)])
    return np.bincount(drawn, minlength=6) / COUNT


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


def likeliest(temperature: float, keep: int) -> np.ndarray:
    logits = LOGITS / temperature
    logits[keep:] = -np.inf
    return softmax(logits)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * float(np.abs(a - b).sum())


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
        ({"temperature": 1.0, "min_p": 0.2}, 3),  # e^-1.5 = 0.223, e^-2 = 0.135
        ({"temperature": 2.0, "min_p": 0.2}, 5),  # temperature first: e^-1.5 for the fifth
        ({"temperature": 1.0, "min_p": 0.3, "top_p": 0.73}, 1),  # renormalized before top-p: 0.731
        ({"temperature": 1.0, "min_p": 1.0}, 1),
    ],
)
def test_frequencies_are_the_distribution_s(settings: dict[str, float], keep: int) -> None:
    got = frequencies({}, **settings)
    assert got[keep:].sum() == 0
    assert distance(got, likeliest(settings["temperature"], keep)) < BOUND
    if keep == 6:  # negative control: the bound can tell
        assert distance(got, likeliest(settings["temperature"] * 0.8, 6)) > BOUND


def test_frequencies_under_xtc_are_those_with_and_without_it() -> None:
    """Above 0.12 are tokens 0 to 2, so XTC leaves 2 to 5; token 0 ends the request and stays, too."""
    settings = {"temperature": 1.0, "xtc_threshold": 0.12, "xtc_probability": 0.4}
    excluded, exempt = LOGITS.copy(), LOGITS.copy()
    excluded[:2], exempt[1] = -np.inf, -np.inf
    for end_ids, less in (((), excluded), ((0,), exempt)):
        mixture = 0.6 * softmax(LOGITS) + 0.4 * softmax(less)
        got = frequencies({"end_ids": end_ids}, **settings)
        assert distance(got, mixture) < BOUND
        assert distance(got, 0.5 * softmax(LOGITS) + 0.5 * softmax(less)) > BOUND
    always = frequencies({}, **{**settings, "xtc_probability": 1.0})
    assert distance(always, softmax(excluded)) < BOUND
    after_top_k = frequencies({}, **{**settings, "xtc_probability": 1.0, "top_k": 2})
    assert after_top_k.tolist() == [0, 1, 0, 0, 0, 0]


def test_frequencies_under_penalties_bias_and_bans() -> None:
    settings = {"repetition_penalty": 2, "frequency_penalty": 0.25, "logit_bias": {3: 1.5, 1: -1}}
    got = frequencies(
        {"prompt": (4,), "output": (0, 0), "position": 2}, temperature=0.7, banned_token_ids=(2,), **settings
    )
    adjusted = np.array([2 / 2 - 0.5, 0, -np.inf, 1.5, -2, -3])
    assert distance(got, softmax(adjusted / 0.7)) < BOUND
    assert distance(got, softmax(adjusted / 0.8)) > BOUND


def test_greedy_takes_the_likeliest_of_the_adjusted_logits() -> None:
    rows = [
        RowSampling(),
        RowSampling(params=SamplingParams(banned_token_ids=(0,))),
        RowSampling(params=SamplingParams(logit_bias={5: 6})),
        RowSampling(params=SamplingParams(presence_penalty=2), output=(0,)),
        RowSampling(params=SamplingParams(min_tokens=1), end_ids=(0, 1)),
        RowSampling(params=SamplingParams(min_tokens=1), end_ids=(0, 1), position=1),
        RowSampling(params=SamplingParams(top_k=1, min_p=1, xtc_threshold=0)),
    ]
    assert draw(rows).tolist() == [0, 1, 5, 1, 2, 0, 0]


def mixed(vocab: int) -> list[RowSampling]:
    """Rows of every kind."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.3, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 7, "min_p": 0.01},
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01},
        {"repetition_penalty": 1.2},
        {"temperature": 2.0, "presence_penalty": 1, "logit_bias": {1: 3, vocab - 1: 5}},
        {"banned_token_ids": range(vocab // 2)},
        {"temperature": 5.0, "min_tokens": 9, "top_p": 0.5},
    ]
    known: dict[str, Any] = {"prompt": (1, 2), "output": (3, 3), "end_ids": (0,)}
    return [
        RowSampling(params=SamplingParams(**s), seed=7, position=i % 3, **known)
        for i, s in enumerate(settings * 4)
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_row_s_token_does_not_depend_on_its_batchmates(dtype: mx.Dtype) -> None:
    vocab = 300
    rows = mixed(vocab)
    logits = mx.array(np.random.default_rng(3).normal(0, 2, (len(rows), vocab))).astype(dtype)
    together = np.array(sample(logits, rows)).tolist()
    assert [int(sample(logits[i : i + 1], [row])) for i, row in enumerate(rows)] == together
    order = np.random.default_rng(4).permutation(len(rows)).tolist()
    shuffled = np.array(sample(logits[mx.array(order)], [rows[i] for i in order])).tolist()
    assert shuffled == [together[i] for i in order]
    assert len(set(together)) > 10


def test_rows_that_are_plain_and_greedy_meet_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(processors, "adjust", lambda logits, rows: seen.append(len(rows)) or logits)
    assert draw([RowSampling(position=5, end_ids=(0,), prompt=(0,))] * 3).tolist() == [0, 0, 0]
    assert seen == []
    draw([RowSampling(), RowSampling(params=SamplingParams(temperature=1)), RowSampling()])
    assert seen == [1]


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


def test_the_logits_that_were_given_stay_as_they_are() -> None:
    rows = [RowSampling(params=SamplingParams(temperature=1.0, banned_token_ids=(0,), top_k=2))] * 2
    logits = mx.array(np.tile(LOGITS, (2, 1)))
    sample(logits, rows)
    assert np.array(logits).tolist() == [LOGITS.tolist()] * 2


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_an_id_and_spare_the_neighbours(value: float) -> None:
    rows = mixed(6)
    logits = np.tile(LOGITS, (2 * len(rows), 1))
    logits[len(rows) :, :] = value
    tokens = np.array(sample(mx.array(logits), [*rows, *rows]))
    assert tokens.max() < 6
    assert tokens[: len(rows)].tolist() == draw(rows).tolist()


def test_sampling_the_largest_penalties_and_biases_stays_finite() -> None:
    logits = np.array([60000.0, -60000.0, 1.0, 0.0], dtype=np.float16)
    for factor, bias in itertools.product((0.01, 100), (-100, 100)):
        params = SamplingParams(
            temperature=1e-5, repetition_penalty=factor, logit_bias={0: -100, 2: bias}, top_p=0.5, min_p=0.1
        )
        row = RowSampling(params=params, prompt=(0, 1, 2))
        assert draw([row], logits).tolist() == [0]
