"""Logprobs and penalties through whole forwards: those of the dense forward, however it is cut up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import LogitsPolicy, RowSampling, TokenLogprobs
from ferrum_mlx.sampling import SamplingParams

from .driver import admit, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140]
OTHER = [200, 1, 33]
ASK = RowSampling(params=SamplingParams(logprobs=3, prompt_logprobs=2))


def same(got: TokenLogprobs, logits: np.ndarray, token: int, count: int) -> bool:
    """Whether that is what a row of the dense forward says of a token."""
    logprobs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert got.token_id == token
    assert got.logprob == pytest.approx(logprobs[token], abs=1e-4)
    assert len(got.top) == count
    assert [p for _, p in got.top] == pytest.approx(sorted(logprobs)[: -count - 1 : -1], abs=1e-4)
    return True


def prompt_logprobs(executor: PagedExecutor, chunk: int, *, beside: bool = False) -> list[Any]:
    """Of PROMPT, prefilled in chunks, then the result of the last one; `beside` another prompt."""
    cache, got, start = admit(executor, PROMPT), [], 0
    while start < len(PROMPT):
        end = min(start + chunk, len(PROMPT))
        items = [
            item(
                cache,
                PROMPT[start:end],
                start,
                is_final_chunk=end == len(PROMPT),
                logits=LogitsPolicy.PROMPT_LOGPROBS,
                targets=tuple(PROMPT[start + 1 : end + 1]),
                sampling=ASK,
            )
        ]
        if beside:
            hot = RowSampling(params=SamplingParams(temperature=2.0, logprobs=20), seed=end)
            items.insert(end % 2, item(admit(executor, OTHER), OTHER, 0, sampling=hot))
        results = {result.cache_id: result for result in run(executor, *items)}
        got += results[cache].prompt_logprobs
        for other in results.keys() - {cache}:
            assert len(results[other].logprobs) == 1
            assert len(results[other].logprobs[0].top) == 20
            executor.release_cache(other)
        start = end
    executor.release_cache(cache)
    return [*got, *results[cache].logprobs, results[cache].token_ids]


def test_prompt_and_output_logprobs_are_the_dense_forward_s(executor: PagedExecutor) -> None:
    dense = executor.forward(PROMPT)
    *prompt, last, tokens = prompt_logprobs(executor, 100)
    assert len(prompt) == len(PROMPT) - 1
    assert all(same(got, dense[i], PROMPT[i + 1], 2) for i, got in enumerate(prompt))
    assert same(last, dense[-1], tokens[0], 3)
    assert (len(tokens), last.rank, last.top[0][0]) == (1, 1, tokens[0])


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("beside", [False, True])
def test_logprobs_of_a_chunked_prompt_are_the_whole_one_s(
    executor: PagedExecutor, chunk: int, beside: bool
) -> None:
    whole = prompt_logprobs(executor, 100)
    got = prompt_logprobs(executor, chunk, beside=beside)
    assert got.pop() == whole.pop()
    assert [(g.token_id, g.rank) for g in got] == [(w.token_id, w.rank) for w in whole]
    np.testing.assert_allclose([g.logprob for g in got], [w.logprob for w in whole], atol=1e-4)


def test_verify_rows_have_the_logprobs_and_penalties_of_plain_decoding(executor: PagedExecutor) -> None:
    """Each row's penalties count the drafts before it; a wrong draft changes what follows it alone."""
    params = SamplingParams(
        repetition_penalty=5, frequency_penalty=2, logprobs=1, temperature=0.9, min_tokens=3, bad_words=["x"]
    )
    first = RowSampling(params=params, seed=3, prompt=PROMPT, end_ids=(97, 98, 99), bad_sequences=((7, 7),))
    cache, output, logprobs = admit(executor, PROMPT), [], []
    while len(output) < 6:
        start = len(PROMPT) + len(output) - 1 if output else 0
        row = first.at(len(output), output)
        result = run(executor, item(cache, output[-1:] or PROMPT, start, sampling=row))[0]
        output += result.token_ids
        logprobs += result.logprobs
    executor.release_cache(cache)

    cache = admit(executor, PROMPT)
    assert run(executor, item(cache, PROMPT, 0, sampling=first))[0].token_ids == (output[0],)
    wrong = (output[3] + 1) % 250
    q_tokens = [*output[:3], wrong]
    verify = item(cache, q_tokens, len(PROMPT), verify=True, sampling=first.at(1, output))
    result = run(executor, verify)[0]
    assert list(result.token_ids[:3]) == output[1:4]
    assert len(result.token_ids) == len(result.logprobs) == 4
    assert [got.token_id for got in result.logprobs] == list(result.token_ids)
    for got, want in zip(result.logprobs[:3], logprobs[1:4], strict=True):
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
    executor.release_cache(cache)


def test_what_is_barred_does_not_come(executor: PagedExecutor) -> None:
    def greedy(**fields: Any) -> int:
        cache = admit(executor, PROMPT)
        result = run(executor, item(cache, PROMPT, 0, sampling=RowSampling(**fields)))[0]
        executor.release_cache(cache)
        return result.token_ids[0]

    first = greedy()
    second = greedy(params=SamplingParams(banned_token_ids=(first,)))
    assert second != first
    assert greedy(params=SamplingParams(min_tokens=1), end_ids=(first,)) == second
    assert greedy(params=SamplingParams(min_tokens=1), end_ids=(first,), position=1) == first
    assert greedy(params=SamplingParams(bad_words=["x"]), bad_sequences=((first,),)) == second


def test_a_greedy_policy_has_no_logprobs_and_plain_rows_neither(executor: PagedExecutor) -> None:
    cache, other = admit(executor, PROMPT), admit(executor, OTHER)
    results = run(
        executor,
        item(cache, PROMPT, 0, sampling=ASK, logits=LogitsPolicy.GREEDY),
        item(other, OTHER, 0),
    )
    assert [(r.logprobs, r.prompt_logprobs, len(r.token_ids)) for r in results] == [((), (), 1)] * 2
    executor.release_cache(cache)
    executor.release_cache(other)
