"""The pair matrix: every two features together give what a plain run gives, exact in float32.

The plain run has the request alone, its prompt in one chunk, an ample pool and no prefix cache; what
the request itself asks for (sampling, penalties, stop strings …) is the same on both sides, and so is the
precision of KV: against the model's own that has a bound (test_quantized_kv.py), not equality. Each
feature says how to tell that it took place, so that no cell passes without it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.kv.manager import KVManager

from .pairs import (
    FEATURES,
    MODELS,
    Case,
    Output,
    adapters_of,
    all_pairs,
    build,
    case_of,
    run,
    submits_of,
    take,
)

PLAIN = {"max_prefill_chunk": 512, "prefix_cache": False}
# Prompt logprobs need every prompt token computed: such a request shares nothing, by design.
REFUSED = {frozenset({"prefix hit", "prompt logprobs"}): "prompt logprobs compute every token of the prompt"}
NO_ROLLBACK = frozenset({"recurrent layers", "speculation"})


@cache
def _plain(
    model: frozenset[str],
    prompt_len: int,
    kv_bits: int | None,
    params: tuple[tuple[str, Any], ...],
    adapter: str,
) -> list[Output]:
    """Each sample alone; n is 1 on this side."""
    wanted = dict(params)
    wanted["logit_bias"] = dict(wanted.get("logit_bias", ()))
    outputs = []
    settings = PLAIN | {"kv_bits": kv_bits}
    settings |= {"adapters": adapters_of(MODELS[model])} if adapter else {}
    for submit in submits_of(Case(prompt_len=prompt_len, adapter=adapter), wanted):
        engine = build(MODELS[model], settings)
        engine.submit(replace(submit, params=replace(submit.params, n=1)))
        output = Output()
        while engine.has_work():
            take({submit.request_id: output}, engine.step())
        engine.shutdown()
        outputs.append(output)
    return outputs


def _plain_outputs(case: Case, params: dict[str, Any]) -> list[Output]:
    frozen = params | {"logit_bias": tuple(params.get("logit_bias", {}).items())}
    return _plain(case.layers, case.prompt_len, case.kv_bits, tuple(sorted(frozen.items())), case.adapter)


def _compare(case: Case, ours: list[Output], plain: list[Output]) -> None:
    for got, want in zip(ours, plain, strict=True):
        assert got.token_ids == want.token_ids
        assert (got.text, got.reason, got.usage) == (want.text, want.reason, want.usage)
        for mine, theirs in ((got.logprobs, want.logprobs), (got.prompt_logprobs, want.prompt_logprobs)):
            assert [(e.token_id, e.rank) for e in mine] == [(e.token_id, e.rank) for e in theirs]
            assert [[t for t, _ in e.top] for e in mine] == [[t for t, _ in e.top] for e in theirs]
            # a recurrence in chunks rounds otherwise than in one: its ids are exact, its floats are close
            atol = 2e-5 if "recurrent" in case.layers else 0
            np.testing.assert_allclose(
                [e.logprob for e in mine], [e.logprob for e in theirs], rtol=0, atol=atol
            )


def _params(case: Case) -> dict[str, Any]:
    if not case.stop:
        return case.params
    texts = [output.text for output in _plain_outputs(case, case.params)]
    return case.params | {"stop": tuple(text[5:7] for text in texts)}  # over a border of tokens


def check(case: Case) -> None:
    params = _params(case)
    result = run(case, params, _plain_outputs(case, case.params) if case.drafts else ())
    _compare(case, result.outputs, _plain_outputs(case, params))
    assert all(proof(result) for proof in case.proofs), "a feature did not take place"
    if case.adapter:
        without = _plain_outputs(replace(case, adapter=""), case.params)
        assert [o.token_ids for o in without] != [o.token_ids for o in _plain_outputs(case, case.params)]


@pytest.mark.parametrize("feature", FEATURES)
def test_alone(feature: str, pair_table: dict[frozenset[str], str]) -> None:
    pair_table[frozenset({feature})] = "differs"
    check(case_of(feature))
    pair_table[frozenset({feature})] = "exact"


@pytest.mark.parametrize(("one", "other"), all_pairs(FEATURES))
def test_pair(one: str, other: str, pair_table: dict[frozenset[str], str]) -> None:
    pair = frozenset({one, other})
    if pair == NO_ROLLBACK:
        executor = build(case_of(one, other).model, {}).executor
        assert not executor.capabilities().speculative_decoding
        pair_table[pair] = "refused: a state cannot be rolled back"
        return
    if pair in REFUSED:
        result = run(case := case_of(one, other), _params(case))
        assert all(request.num_cached_tokens == 0 for request in result.requests)
        _compare(case, result.outputs, _plain_outputs(case, _params(case)))
        pair_table[pair] = f"refused: {REFUSED[pair]}"
        return
    pair_table[pair] = "differs"
    check(case_of(one, other))
    pair_table[pair] = "exact"


@pytest.mark.parametrize("layers", MODELS)
def test_a_wrong_block_table_is_noticed(layers: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sequences that overwrite each other's KV give other outputs."""
    case = replace(case_of("batching", "chunked prefill"), layers=layers, proofs=[])
    plain = _plain_outputs(case, {})

    def shared(self: KVManager, cache_id: int, group: int, start: int, end: int) -> np.ndarray:
        return np.arange(start, end, dtype=np.int32) + self.block_size

    result = run(case, {})
    _compare(case, result.outputs, plain)
    started = MLXExecutor.prepare_startup
    monkeypatch.setattr(
        MLXExecutor,
        "prepare_startup",
        lambda self: (started(self), monkeypatch.setattr(KVManager, "slot_mapping", shared)),
    )
    with pytest.raises(AssertionError):
        _compare(case, run(case, {}).outputs, plain)
