"""What a forward gives does not depend on how it was cut up or who shared it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import LogitsPolicy, RowSampling, UnifiedBatch
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import ContractError
from ferrum_mlx.sampling import SamplingParams

from .driver import FULL, admit, generate, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140]
OTHER = [200, 1, 33]


@pytest.fixture(autouse=True)
def _no_block_left(executor: PagedExecutor):
    yield
    assert executor.kv_capacity_snapshot().used_blocks == 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_equals_whole(executor: PagedExecutor, chunk: int) -> None:
    whole = generate(executor, PROMPT, 12)
    assert generate(executor, PROMPT, 12, chunk=chunk) == whole
    assert generate(executor, PROMPT[:-1], 12) != whole  # the last token counts


def test_mixed_batch_equals_alone(executor: PagedExecutor) -> None:
    """A decode and two chunks of different sequences in each forward."""
    alone = [generate(executor, PROMPT, 4), generate(executor, OTHER, 4)]
    a, b = admit(executor, PROMPT), admit(executor, OTHER)
    first = run(executor, item(a, PROMPT[:6], 0, is_final_chunk=False), item(b, OTHER, 0))
    assert first[0].token_ids == ()
    assert first[1].token_ids == (alone[1][0],)
    second = run(executor, item(a, PROMPT[6:], 6), item(b, alone[1][:1], len(OTHER)))
    assert [r.cache_id for r in second] == [a, b]
    assert [r.token_ids for r in second] == [(alone[0][0],), (alone[1][1],)]
    executor.release_cache(a)
    executor.release_cache(b)


def test_logits_are_the_dense_forwards(executor: PagedExecutor) -> None:
    dense = executor.forward(PROMPT)
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT[:5], 0, is_final_chunk=False))
    result = run(executor, item(cache, PROMPT[5:], 5, logits=FULL))[0]
    assert result.logits is not None
    assert result.logits.shape == (1, executor.info.vocab_size)
    np.testing.assert_allclose(result.logits[0], dense[-1], atol=1e-4, rtol=1e-4)
    assert result.token_ids == (int(dense[-1].argmax()),)
    executor.release_cache(cache)


def test_verify_gives_every_row_and_truncation_forgets(executor: PagedExecutor) -> None:
    plain = generate(executor, PROMPT, 6)
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT, 0))
    wrong = (plain[2] + 1) % 256
    drafts = [plain[0], plain[1], wrong, wrong]
    rows = run(executor, item(cache, drafts, len(PROMPT), verify=True))[0].token_ids
    assert list(rows[:2]) == plain[1:3]
    assert len(rows) == 4
    executor.truncate_kv(cache, len(PROMPT) + 2)
    rest = run(executor, item(cache, [plain[2]], len(PROMPT) + 2))[0].token_ids
    assert list(rest) == plain[3:4]
    executor.release_cache(cache)


@pytest.mark.parametrize("fields", [{"num_tokens": 2, "token_ids": ()}, {"num_tokens": 0, "token_ids": ()}])
@pytest.mark.parametrize("verify", [True, False])
def test_only_a_chunk_may_complete_in_part_and_never_in_none(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch, verify: bool, fields: dict[str, Any]
) -> None:
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT[:9], 0, is_final_chunk=False))
    executor.reserve_kv_slots([KvSlotRequest(cache, 13)])
    launch = executor._launch

    def partly(batch: UnifiedBatch) -> SimpleNamespace:
        pending = launch(batch)
        return SimpleNamespace(result=lambda: [replace(r, **fields) for r in pending.result()])

    monkeypatch.setattr(executor, "_launch", partly)
    batch = UnifiedBatch((item(cache, PROMPT[9:], 9, verify=verify),))
    if verify or not fields["num_tokens"]:
        with pytest.raises(ContractError, match="computed"):
            executor.unified_decode(batch)
        assert executor.kv.length(cache) == 9
    else:
        executor.unified_decode(batch)
        assert executor.kv.length(cache) == 11
    executor.release_cache(cache)


def test_skipping_the_truncation_changes_the_output(executor: PagedExecutor) -> None:
    """Negative control of the test above: wrong drafts left in the cache are seen."""
    plain = generate(executor, PROMPT, 4)
    cache = admit(executor, PROMPT)
    run(executor, item(cache, PROMPT, 0))
    dirt = [(plain[0] + 1 + i) % 256 for i in range(12)]
    run(executor, item(cache, dirt, len(PROMPT), verify=True))
    dirty = run(executor, item(cache, [plain[0]], len(PROMPT) + 12, logits=FULL))[0]
    executor.truncate_kv(cache, len(PROMPT))
    clean = run(executor, item(cache, [plain[0]], len(PROMPT), logits=FULL))[0]
    assert clean.token_ids == (plain[1],)
    assert not np.allclose(dirty.logits, clean.logits, atol=1e-3)
    executor.release_cache(cache)


def test_a_row_s_noise_is_its_own(executor: PagedExecutor) -> None:
    """Same seed, same output: alone, chunked, and beside a neighbour; another seed differs."""
    hot = RowSampling(params=SamplingParams(temperature=1.5), seed=7)
    alone = generate(executor, PROMPT, 10, sampling=hot)
    assert generate(executor, PROMPT, 10, chunk=4, sampling=hot) == alone
    assert (
        generate(executor, PROMPT, 10, sampling=RowSampling(params=SamplingParams(temperature=1.5), seed=8))
        != alone
    )
    a, b = admit(executor, OTHER), admit(executor, PROMPT)
    neighbour = RowSampling(params=SamplingParams(temperature=0.7), seed=99)
    results = run(executor, item(a, OTHER, 0, sampling=neighbour), item(b, PROMPT, 0, sampling=hot))
    assert results[1].token_ids == (alone[0],)
    executor.release_cache(a)
    executor.release_cache(b)


def test_greedy_policy_ignores_temperature(executor: PagedExecutor) -> None:
    hot = RowSampling(params=SamplingParams(temperature=50.0), seed=3)
    greedy = generate(executor, PROMPT, 1)
    cache = admit(executor, PROMPT)
    got = run(executor, item(cache, PROMPT, 0, sampling=hot, logits=LogitsPolicy.GREEDY))[0].token_ids
    assert list(got) == greedy
    executor.release_cache(cache)


def test_a_batch_that_breaks_the_contract_changes_nothing(executor: PagedExecutor) -> None:
    cache, long = admit(executor, PROMPT), admit(executor, [1] * 60)
    executor.reserve_kv_slots([KvSlotRequest(cache, 8), KvSlotRequest(long, 60)])
    other = admit(executor, [1] * 60)
    executor.reserve_kv_slots([KvSlotRequest(other, 60)])
    bad = {
        "empty": [],
        "no tokens": [item(cache, [], 0)],
        "starts at 1": [item(cache, PROMPT[:2], 1)],
        "has reserved": [item(cache, PROMPT, 0)],
        "no cache": [item(10**6, PROMPT[:2], 0)],
        "twice": [item(cache, PROMPT[:1], 0), item(cache, PROMPT[:1], 0)],
        "out of range": [item(cache, [executor.info.vocab_size], 0)],
        "a token id": [item(cache, [-2], 0)],
        "intermediate": [item(cache, PROMPT[:2], 0, verify=True, is_final_chunk=False)],
        "120 tokens": [item(long, [1] * 60, 0), item(other, [1] * 60, 0)],
    }
    before = executor.status().forwards
    for words, items in bad.items():
        with pytest.raises(ContractError, match=words):
            executor.batch_prefill(items)
    assert executor.status().forwards == before
    with pytest.raises(ContractError, match="exactly one token"):
        executor.decode(item(cache, PROMPT[:2], 0))
    with pytest.raises(ContractError, match="verify=True"):
        executor.forward_verify(item(cache, PROMPT[:2], 0))
    for wasted in (cache, long, other):
        executor.release_cache(wasted)
    assert generate(executor, PROMPT, 3) == generate(executor, PROMPT, 3, chunk=2)


def test_a_forward_that_fails_is_over_and_the_next_one_works(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(executor, PROMPT, 4)
    cache = admit(executor, PROMPT)
    executor.reserve_kv_slots([KvSlotRequest(cache, len(PROMPT))])
    launch = executor._launch

    def fail(batch: UnifiedBatch):
        launch(batch)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_launch", fail)
        with pytest.raises(RuntimeError):
            executor.prefill(item(cache, PROMPT, 0))
    assert executor.status().state.value == "error"
    executor.release_cache(cache)
    assert generate(executor, PROMPT, 4) == expected
    assert executor.status().state.value == "ready"
