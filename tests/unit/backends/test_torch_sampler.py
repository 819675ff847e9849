"""torch's sampler, stages and logprobs: against the same formulas as MLX's, against MLX's, row by row."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from ferrum_mlx.backends.mlx import processors as mlx_processors
from ferrum_mlx.backends.mlx.sampler import sample as mlx_sample
from ferrum_mlx.backends.torch import logprobs as module
from ferrum_mlx.backends.torch import processors
from ferrum_mlx.backends.torch.logprobs import RowLogprobs
from ferrum_mlx.backends.torch.sampler import gumbel, sample
from ferrum_mlx.batch import RowSampling, TokenLogprobs
from ferrum_mlx.sampling import SamplingParams

from .test_processors import EVERYTHING, formula, logits_of, row
from .test_sampler import BOUND, COUNT, LOGITS, distance, likeliest, mixed, softmax

mx.set_default_device(mx.cpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STAGES = ["keep_min_p", "keep_likeliest", "exclude_top"]


def draw(rows: list[RowSampling], logits: np.ndarray = LOGITS) -> list[int]:
    return sample(torch.from_numpy(np.tile(logits, (len(rows), 1))), rows).tolist()


def frequencies(fields: dict[str, Any], **settings: Any) -> np.ndarray:
    """Of the six tokens, over many seeds."""
    params = SamplingParams(**settings)
    drawn = draw([RowSampling(params=params, seed=seed, **fields) for seed in range(COUNT)])
    return np.bincount(drawn, minlength=6) / COUNT


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.74}, 2),  # renormalized: 0.731, then 1
        ({"temperature": 2.0, "top_p": 0.5}, 2),  # temperature first: 0.405, 0.245
        ({"temperature": 2.0, "min_p": 0.2}, 5),  # temperature first: e^-1.5 for the fifth
        ({"temperature": 1.0, "min_p": 0.3, "top_p": 0.73}, 1),  # renormalized before top-p: 0.731
    ],
)
def test_frequencies_are_the_distribution_s(settings: dict[str, float], keep: int) -> None:
    got = frequencies({}, **settings)
    assert got[keep:].sum() == 0
    assert distance(got, likeliest(settings["temperature"], keep)) < BOUND
    if keep == 6:  # negative control: the bound can tell
        assert distance(got, likeliest(settings["temperature"] * 0.8, 6)) > BOUND


def test_frequencies_under_xtc_are_those_with_and_without_it() -> None:
    settings = {"temperature": 1.0, "xtc_threshold": 0.12, "xtc_probability": 0.4}
    excluded, exempt = LOGITS.copy(), LOGITS.copy()
    excluded[:2], exempt[1] = -np.inf, -np.inf
    for end_ids, less in (((), excluded), ((0,), exempt)):
        got = frequencies({"end_ids": end_ids}, **settings)
        assert distance(got, 0.6 * softmax(LOGITS) + 0.4 * softmax(less)) < BOUND


def test_noise_is_a_gumbel_s_and_depends_on_seed_index_and_position_alone() -> None:
    rows = [
        RowSampling(seed=s, sample_index=i, position=p)
        for s, i, p in itertools.product((0, 1), (0, 1), (0, 1))
    ]
    streams = gumbel(rows, torch.zeros(8, 5000))
    noise = streams.double().flatten().sort().values
    expected = torch.exp(-torch.exp(-noise))  # the distribution function, at the sorted values
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (expected - steps).abs().max() < 1.95 / len(noise) ** 0.5  # Kolmogorov–Smirnov, 99.9 %
    correlations = torch.corrcoef(streams) - torch.eye(len(rows))
    assert correlations.abs().max() < 4.5 / 5000**0.5
    for i, named in enumerate(rows):
        other = RowSampling(**{**_named(named), "params": SamplingParams(top_k=2), "output": (5,)})
        assert torch.equal(gumbel([other], torch.zeros(1, 5000))[0], streams[i])
    assert torch.equal(gumbel(rows, torch.zeros(8, 100)), streams[:, :100])


def _named(row: RowSampling) -> dict[str, int]:
    return {"seed": row.seed, "sample_index": row.sample_index, "position": row.position}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_token_does_not_depend_on_its_batchmates(dtype: torch.dtype) -> None:
    vocab = 300
    rows = mixed(vocab)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (len(rows), vocab))).to(dtype)
    together = sample(logits, rows).tolist()
    assert [int(sample(logits[i : i + 1], [row])) for i, row in enumerate(rows)] == together
    order = np.random.default_rng(4).permutation(len(rows)).tolist()
    assert sample(logits[order], [rows[i] for i in order]).tolist() == [together[i] for i in order]
    assert len(set(together)) > 10


def test_greedy_rows_are_mlx_s() -> None:
    """Ties, too: the lowest id."""
    rows = [row(**settings) for settings in EVERYTHING]
    logits = np.round(logits_of(len(rows)))
    theirs = np.array(mlx_sample(mx.array(logits), rows)).tolist()
    assert sample(torch.from_numpy(logits), rows).tolist() == theirs
    assert np.isin(logits, logits.max(axis=1)).sum() > len(rows)


def test_the_logits_that_were_given_stay_as_they_are() -> None:
    rows = [RowSampling(params=SamplingParams(temperature=1.0, banned_token_ids=(0,), top_k=2))] * 2
    logits = torch.from_numpy(np.tile(LOGITS, (2, 1)))
    sample(logits, rows)
    assert logits.tolist() == [LOGITS.tolist()] * 2


def test_tiny_temperatures_and_top_p_are_greedy_and_ties_stay() -> None:
    cold = [RowSampling(params=SamplingParams(temperature=t), seed=3) for t in (1e-40, 1e-9, 9e-6)]
    narrow = [RowSampling(params=SamplingParams(temperature=5.0, top_p=1e-9), seed=s) for s in range(50)]
    assert set(draw(cold + narrow)) == {0}
    rows = [RowSampling(params=SamplingParams(temperature=1.0, top_k=1), seed=s) for s in range(200)]
    assert set(sample(torch.zeros(200, 4), rows).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_an_id_and_spare_the_neighbours(value: float) -> None:
    rows = mixed(6)
    logits = np.tile(LOGITS, (2 * len(rows), 1))
    logits[len(rows) :, :] = value
    tokens = sample(torch.from_numpy(logits), [*rows, *rows])
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 6
    assert tokens[: len(rows)].tolist() == draw(rows)


# Stages


@pytest.mark.parametrize("settings", EVERYTHING, ids=str)
def test_adjusted_logits_are_the_formula_s(settings: dict[str, Any]) -> None:
    (logits,) = logits_of(1)
    got = processors.adjust(torch.from_numpy(logits[None]), [row(**settings)])[0].numpy()
    np.testing.assert_allclose(got, formula(logits, row(**settings)), rtol=1e-6, atol=1e-6)
    assert (got != logits).any() == processors.is_adjusted(row(**settings))


def test_adjusted_rows_are_each_by_itself_to_the_bit_and_the_caller_s_stay() -> None:
    rows = [row(**settings) for settings in EVERYTHING]
    logits = torch.from_numpy(logits_of(len(rows)))
    together = processors.adjust(logits, rows)
    for i, alone in enumerate(rows):
        assert torch.equal(processors.adjust(logits[i : i + 1], [alone])[0], together[i])
    np.testing.assert_array_equal(logits.numpy(), logits_of(len(rows)))


def test_ids_that_the_vocabulary_lacks_reach_no_memory() -> None:
    far = 10**30
    params = SamplingParams(logit_bias={far: 5}, banned_token_ids=(far, 40), min_tokens=9)
    rows = [RowSampling(params=params, end_ids=(40, far, -1), bad_sequences=((far,),))]
    logits = torch.from_numpy(logits_of(1))
    assert torch.equal(processors.adjust(logits, rows), logits)


SETTINGS: list[dict[str, Any]] = [
    {"min_p": 0.1, "top_k": 3, "xtc_threshold": 0.05},
    {"min_p": 0.9, "top_p": 0.5, "xtc_threshold": 0.4},
    {"min_p": 1e-5, "top_p": 0.99, "top_k": 20, "xtc_threshold": 0.0},
    {"min_p": 1, "top_k": 10**30, "xtc_threshold": 0.5},
    {"min_p": 0.3, "top_p": 1e-9},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.9},
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_keeps_what_mlx_s_keeps_and_takes_each_row_by_itself(stage: str) -> None:
    rows = [RowSampling(params=SamplingParams(temperature=1, **s), end_ids=(8,)) for s in SETTINGS]
    logits = logits_of(len(rows))
    together = getattr(processors, stage)(torch.from_numpy(logits), rows)
    theirs = np.array(getattr(mlx_processors, stage)(mx.array(logits), rows))
    np.testing.assert_array_equal(together.numpy(), theirs)
    for i, alone in enumerate(rows):
        got = getattr(processors, stage)(torch.from_numpy(logits[i : i + 1]), [alone])[0]
        assert torch.equal(got, together[i])
    assert together.isinf().any()


def test_xtc_s_coin_is_mlx_s() -> None:
    params = SamplingParams(temperature=1, xtc_probability=0.3)
    rows = [RowSampling(params=params, seed=1, position=i) for i in range(500)]
    tosses = [processors.excludes_top(row) for row in rows]
    assert tosses == [mlx_processors.excludes_top(row) for row in rows]
    assert 0 < sum(tosses) < 500


# Logprobs

VOCAB = 50
COUNTS = [0, 3, 20, 1, 20, 5]


def random_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Half precision ties many of them."""
    return torch.from_numpy(np.random.default_rng(2).normal(0, 3, (6, VOCAB))).to(dtype)


def read(logits: torch.Tensor, rows: list[int], tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    return RowLogprobs(logits, rows, torch.tensor(tokens, dtype=torch.int64), counts).read()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_formula_s_alone_and_in_any_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows, tokens = random_logits(dtype), [4, 0, 2, 2, 1, 5], [0, 49, 7, 8, 30, 11]
    together = read(logits, rows, tokens, COUNTS)
    for got, at, token, count in zip(together, rows, tokens, COUNTS, strict=True):
        exact = logits[at].double().numpy()
        exact = exact - np.log(np.exp(exact).sum())
        best = sorted(range(VOCAB), key=lambda i: (-exact[i], i))[:count]
        assert (got.token_id, got.rank) == (token, 1 + sum(exact > exact[token]))
        assert got.logprob == pytest.approx(exact[token], abs=1e-5)
        assert [i for i, _ in got.top] == best
        np.testing.assert_allclose([p for _, p in got.top], exact[best], atol=1e-5)
        assert read(logits[at : at + 1], [0], [token], [count]) == [got]
    assert read(logits, rows[::-1], tokens[::-1], COUNTS[::-1]) == together[::-1]
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    assert read(logits, rows, tokens, COUNTS) == together


def test_of_equals_the_lowest_id_is_first_whatever_the_width() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]])
    for width in range(1, 7):
        for token, rank in ((1, 1), (4, 1), (2, 4), (5, 4), (0, 6)):
            (got,) = read(logits, [0], [token], [width])
            assert got.rank == rank
            assert [i for i, _ in got.top] == [1, 3, 4, 2, 5, 0][:width]
    values = np.random.default_rng(1).integers(0, 5, (4, 40_000)).astype(np.float32)
    for at, got in enumerate(read(torch.from_numpy(values), [0, 1, 2, 3], [0] * 4, [20] * 4)):
        assert [i for i, _ in got.top] == np.argsort(-values[at], kind="stable")[:20].tolist()


def test_more_than_the_vocabulary_is_all_of_it_and_none_is_none() -> None:
    (got,) = read(torch.tensor([[1.0, 0.0, 3.0]]), [0], [1], [20])
    assert [token for token, _ in got.top] == [2, 0, 1]
    assert read(random_logits(), [], [], []) == []
