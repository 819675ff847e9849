"""Each stage against its formula in numpy, against mlx-lm where it means the same, and row by row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from ferrum_mlx.backends.mlx import processors
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.sampling import SamplingParams

mx.set_default_device(mx.cpu)
VOCAB = 40
PROMPT, OUTPUT = [3, 3, 8, 11, 39], [5, 8, 5, 5, 0]
EVERYTHING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 2, "presence_penalty": -0.5, "frequency_penalty": -1},
    {"logit_bias": {2: 4.5, 5: -100, 39: 0.25}},
    {"logit_bias": {8: 3}, "repetition_penalty": 1.7},
    {"banned_token_ids": (0, 8, 39)},
    {"banned_token_ids": (8,), "logit_bias": {8: 100}},
    {"min_tokens": 6},
    {"min_tokens": 5},
    {"bad_words": ["x"]},
]


def logits_of(count: int) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 3, (count, VOCAB)).astype(np.float32)


def row(**settings: Any) -> RowSampling:
    return RowSampling(
        params=SamplingParams(**settings),
        prompt=PROMPT,
        output=OUTPUT,
        position=len(OUTPUT),
        end_ids=(7, 30, 5000),
        bad_sequences=((5, 0, 1), (0, 2), (9, 0, 3), (4,), (900,)) if "bad_words" in settings else (),
    )


def adjusted(logits: np.ndarray, rows: list[RowSampling]) -> np.ndarray:
    return np.array(processors.adjust(mx.array(logits), rows))


def formula(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """One row of float64, token by token."""
    params = row.params
    result = logits.astype(np.float64)
    for token in range(VOCAB):
        result[token] += params.logit_bias.get(token, 0)
        if token in (*row.prompt, *row.output):
            factor = params.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        times = list(row.output).count(token)
        result[token] -= params.presence_penalty * (times > 0) + params.frequency_penalty * times
        ends = row.position < params.min_tokens and token in row.end_ids
        if ends or token in params.banned_token_ids or (params.bad_words and token in (1, 2, 4)):
            result[token] = -np.inf
    return result


@pytest.mark.parametrize("settings", EVERYTHING, ids=str)
def test_adjusted_logits_are_the_formula_s(settings: dict[str, Any]) -> None:
    (logits,) = logits_of(1)
    (got,) = adjusted(logits[None], [row(**settings)])
    np.testing.assert_allclose(got, formula(logits, row(**settings)), rtol=1e-6, atol=1e-6)
    assert processors.is_adjusted(row(**settings)) == (settings not in ({}, {"min_tokens": 5}))
    assert (got != logits).any() == processors.is_adjusted(row(**settings))


def test_a_row_is_adjusted_by_itself_to_the_bit() -> None:
    rows = [row(**settings) for settings in EVERYTHING]
    logits = logits_of(len(rows))
    together = adjusted(logits, rows)
    for i, alone in enumerate(rows):
        np.testing.assert_array_equal(adjusted(logits[i : i + 1], [alone])[0], together[i])
    np.testing.assert_array_equal(adjusted(logits[::-1].copy(), rows[::-1])[::-1], together)


def test_the_caller_s_logits_stay_as_they_are() -> None:
    rows = [row(banned_token_ids=(1,)), row(repetition_penalty=2)]
    logits = mx.array(logits_of(2))
    processors.adjust(logits, rows)
    np.testing.assert_array_equal(np.array(logits), logits_of(2))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"logit_bias": {2: 4.5, 5: -20, 8: 3}},
        {"logit_bias": {8: -30, 3: 5}, "repetition_penalty": 1.7},  # the bias comes first
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 2, "presence_penalty": -0.5, "frequency_penalty": -1},
    ],
    ids=str,
)
def test_bias_and_penalties_are_mlx_lm_s(settings: dict[str, Any]) -> None:
    logits = logits_of(1)
    mine = row(**settings)
    # mlx-lm lets all its penalties see the prompt, and a presence penalty that sees a token twice is
    # defined by its index assignment; so the output alone stands for all that was before.
    mine = RowSampling(params=mine.params, output=OUTPUT)
    theirs = mx.array(logits)
    for process in sample_utils.make_logits_processors(**settings):
        theirs = process(mx.array(OUTPUT), theirs)
    np.testing.assert_allclose(adjusted(logits, [mine]), np.array(theirs), rtol=1e-6)


def test_ids_that_the_vocabulary_lacks_reach_no_memory() -> None:
    far = 10**30
    params = SamplingParams(logit_bias={far: 5}, banned_token_ids=(far, VOCAB), min_tokens=9)
    rows = [RowSampling(params=params, end_ids=(VOCAB, far, -1), bad_sequences=((far,),))]
    np.testing.assert_array_equal(adjusted(logits_of(1), rows), logits_of(1))


# Of rows with a temperature


def kept(stage: Any, logits: np.ndarray, *settings: dict[str, Any], **fields: Any) -> np.ndarray:
    rows = [RowSampling(params=SamplingParams(temperature=1, **s), **fields) for s in settings]
    return ~np.isinf(np.array(stage(mx.array(logits), rows)))


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 1.0])
def test_min_p_is_mlx_lm_s_and_the_formula(min_p: float) -> None:
    logits = logits_of(1)
    got = kept(processors.keep_min_p, logits, {"min_p": min_p})
    probabilities = np.exp(logits - logits.max())
    np.testing.assert_array_equal(got, probabilities >= min_p)
    np.testing.assert_array_equal(got, ~np.isinf(np.array(sample_utils.apply_min_p(mx.array(logits), min_p))))
    assert 0 < got.sum() < VOCAB


@pytest.mark.parametrize("top_k", [1, 2, 7, 39])
def test_top_k_is_mlx_lm_s(top_k: int) -> None:
    logits = logits_of(3)
    got = kept(processors.keep_likeliest, logits, *[{"top_k": top_k}] * 3)
    np.testing.assert_array_equal(got, ~np.isinf(np.array(sample_utils.apply_top_k(mx.array(logits), top_k))))
    assert got.sum() == 3 * top_k


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_is_mlx_lm_s(top_p: float) -> None:
    logits = mx.array(logits_of(3))
    normal = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    got = kept(processors.keep_likeliest, np.array(logits), *[{"top_p": top_p}] * 3)
    np.testing.assert_array_equal(got, ~np.isinf(np.array(sample_utils.apply_top_p(normal, top_p))))
    assert got.any(axis=-1).all()


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("special", [(), (0,), (8, 39)])
def test_xtc_is_mlx_lm_s(threshold: float, special: tuple[int, ...]) -> None:
    logits = logits_of(4)
    settings = {"xtc_probability": 1, "xtc_threshold": threshold}
    got = kept(processors.exclude_top, logits, *[settings] * 4, end_ids=special)
    theirs = sample_utils.apply_xtc(mx.array(logits), 1.0, threshold, list(special))
    np.testing.assert_array_equal(got, ~np.isinf(np.array(theirs)))
    assert got.any(axis=-1).all()
    assert got.all() == (threshold == 0.5)


def test_xtc_s_coin_is_the_row_s_own_and_fair() -> None:
    def tosses(probability: float, **fields: int) -> list[bool]:
        params = SamplingParams(temperature=1, xtc_probability=probability)
        return [
            processors.excludes_top(RowSampling(params=params, **{"seed": 1, "position": i, **fields}))
            for i in range(4000)
        ]

    often = tosses(0.3)
    assert abs(np.mean(often) - 0.3) < 0.03  # four standard deviations
    assert tosses(0.3) == often
    assert tosses(0.3, seed=2) != often != tosses(0.3, sample_index=1)
    assert not any(tosses(0))
    assert all(tosses(1))
    assert all(later for early, later in zip(often, tosses(0.6), strict=True) if early)


@pytest.mark.parametrize("stage", [processors.keep_min_p, processors.keep_likeliest, processors.exclude_top])
def test_a_stage_takes_each_row_by_itself_to_the_bit(stage: Any) -> None:
    settings: list[dict[str, Any]] = [
        {"min_p": 0.1, "top_k": 3, "xtc_threshold": 0.05},
        {"min_p": 0.9, "top_p": 0.5, "xtc_threshold": 0.4},
        {"min_p": 1e-5, "top_p": 0.99, "top_k": 20},
        {"min_p": 1, "top_k": 10**30},
    ]
    rows = [RowSampling(params=SamplingParams(temperature=1, **s)) for s in settings]
    logits = logits_of(len(rows))
    together = np.array(stage(mx.array(logits), rows))
    for i, alone in enumerate(rows):
        np.testing.assert_array_equal(np.array(stage(mx.array(logits[i : i + 1]), [alone]))[0], together[i])
