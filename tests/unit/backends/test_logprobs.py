"""Logprobs against a float64 log-softmax, and row by row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx import logprobs as module
from ferrum_mlx.backends.mlx.logprobs import RowLogprobs
from ferrum_mlx.batch import TokenLogprobs

mx.set_default_device(mx.cpu)
VOCAB = 50
COUNTS = [0, 3, 20, 1, 20, 5]


def logits_of(dtype: mx.Dtype = mx.float32, rows: int = 6) -> mx.array:
    """Half precision ties many of them."""
    return mx.array(np.random.default_rng(2).normal(0, 3, (rows, VOCAB))).astype(dtype)


def read(logits: mx.array, rows: list[int], tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    return RowLogprobs(logits, rows, mx.array(tokens), counts).read()


def formula(logits: mx.array, row: int, token: int, count: int) -> TokenLogprobs:
    exact = np.array(logits[row].astype(mx.float32)).astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum())
    best = sorted(range(VOCAB), key=lambda i: (-logprobs[i], i))[:count]
    rank = 1 + sum(logprobs > logprobs[token])
    return TokenLogprobs(token, logprobs[token], rank, tuple((i, logprobs[i]) for i in best))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_logprobs_are_the_formula_s(dtype: mx.Dtype) -> None:
    logits = logits_of(dtype)
    rows, tokens = [4, 0, 2, 2, 1, 5], [0, 49, 7, 8, 30, 11]
    for got, *args in zip(read(logits, rows, tokens, COUNTS), rows, tokens, COUNTS, strict=True):
        want = formula(logits, *args)
        assert (got.token_id, got.rank) == (want.token_id, want.rank)
        assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [token for token, _ in got.top] == [token for token, _ in want.top]
        np.testing.assert_allclose([p for _, p in got.top], [p for _, p in want.top], atol=1e-5)


def test_the_likeliest_has_rank_1_and_of_equals_the_lowest_id_is_first() -> None:
    logits = mx.array([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]])
    for width in range(1, 7):
        for token, rank in ((1, 1), (4, 1), (2, 4), (5, 4), (0, 6)):
            (got,) = read(logits, [0], [token], [width])
            assert got.rank == rank
            assert [i for i, _ in got.top] == [1, 3, 4, 2, 5, 0][:width]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_is_told_the_same_alone_and_in_any_batch(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows, tokens = logits_of(dtype), list(range(6)), [1, 2, 3, 4, 5, 6]
    together = read(logits, rows, tokens, COUNTS)
    for row in rows:
        assert read(logits[row : row + 1], [0], [tokens[row]], [COUNTS[row]]) == [together[row]]
    assert read(logits, rows[::-1], tokens[::-1], COUNTS[::-1]) == together[::-1]
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    assert read(logits, rows, tokens, COUNTS) == together


def test_ties_at_the_end_of_a_list_are_broken_alike_in_a_large_vocabulary() -> None:
    values = np.random.default_rng(1).integers(0, 5, (4, 40_000)).astype(np.float32)
    for width in (1, 3, 20):
        for row, got in enumerate(read(mx.array(values), [0, 1, 2, 3], [0] * 4, [width] * 4)):
            assert [i for i, _ in got.top] == np.argsort(-values[row], kind="stable")[:width].tolist()


def test_more_than_the_vocabulary_is_all_of_it_and_none_is_none() -> None:
    (got,) = read(mx.array([[1.0, 0.0, 3.0]]), [0], [1], [20])
    assert [token for token, _ in got.top] == [2, 0, 1]
    assert read(logits_of(), [], [], []) == []
    assert RowLogprobs(logits_of(), [], mx.array([]), []).arrays == []
