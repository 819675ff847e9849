"""The state of recurrent layers: restored from snapshots, recomputed, given back, never stale."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.state import StateStore
from ferrum_mlx.backends.zoo import VOCAB
from ferrum_mlx.batch import LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.errors import ContractError

from . import drive
from .nearties import compare, faults

BLOCK = 8
NEW = 12
STATEFUL = [
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "falcon_h1",
    "gear",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
]


def _executor(name: str, host: bool = True) -> MLXExecutor:
    executor, _ = drive.executor(name, host=host, block_size=BLOCK, chunk=64, budget=64)
    executor.prepare_startup()
    assert executor.recurrent_state_spec()
    return executor


def _admit(
    executor: MLXExecutor, request_id: str, prompt: Sequence[int], use_prefix: bool = True
) -> Admitted:
    admission = executor.try_admit_prefill(request_id, prompt, use_prefix=use_prefix)
    assert isinstance(admission, Admitted)
    return admission


def _step(executor: MLXExecutor, cache_id: int, ids: Sequence[int], start: int) -> np.ndarray:
    """The last row's logits."""
    executor.reserve_kv_slots([KvSlotRequest(cache_id, start + len(ids))])
    item = UnifiedItem(cache_id=cache_id, q_tokens=tuple(ids), pos_offset=start, logits=LogitsPolicy.FULL)
    logits = executor.prefill(item).logits
    assert logits is not None
    return logits[-1]


def _prefill(executor: MLXExecutor, admission: Admitted, prompt: Sequence[int]) -> np.ndarray:
    """Behind what was cached, and cut where the executor wants to keep the state."""
    start = admission.num_cached_tokens
    if admission.split_at is not None and start < admission.split_at:
        _step(executor, admission.cache_id, prompt[start : admission.split_at], start)
        start = admission.split_at
    return _step(executor, admission.cache_id, prompt[start:], start)


def _generate(
    executor: MLXExecutor, admission: Admitted, prompt: Sequence[int], count: int = NEW
) -> list[int]:
    known = list(prompt)
    row = _prefill(executor, admission, prompt)
    while True:
        known.append(int(row.argmax()))
        if len(known) == len(prompt) + count:
            return known[len(prompt) :]
        row = _step(executor, admission.cache_id, known[-1:], len(known) - 1)


def _check(name: str, executor: MLXExecutor, prompt: list[int], got: list[int]) -> None:
    def ours(ids: list[int]) -> np.ndarray:
        admission = _admit(executor, "near-tie", ids, use_prefix=False)
        row = _step(executor, admission.cache_id, ids, 0)
        executor.release_cache(admission.cache_id)
        return row

    want = drive.greedy(drive.reference_model(name), prompt, len(got))
    assert faults([compare(prompt, got, want, ours, lambda ids: drive.reference_logits(name, ids)[-1])]) == []


def _prompts() -> tuple[list[int], list[int], list[int]]:
    """Two that share 32 tokens, four blocks, and another one."""
    first, other = drive.prompts()[0], drive.prompts()[3]
    return first, [*first[:32], 7, 120, 44], other


@pytest.mark.parametrize("name", STATEFUL)
def test_a_prompt_that_begins_in_a_snapshot_gives_the_ids_of_a_cold_one(name: str) -> None:
    executor = _executor(name)
    first, second, _ = _prompts()
    a = _admit(executor, "a", first)
    assert a.split_at == 32
    _check(name, executor, first, _generate(executor, a, first))
    b = _admit(executor, "b", second)
    assert b.num_cached_tokens == 32
    _check(name, executor, second, _generate(executor, b, second))
    turn = [*first, *_generate(executor, _admit(executor, "again", first), first), 9]
    executor.release_cache(a.cache_id)
    c = _admit(executor, "next turn", turn)  # a decoding snapshot, behind the prompt's
    assert c.num_cached_tokens == len(turn) // BLOCK * BLOCK > 40
    _check(name, executor, turn, _generate(executor, c, turn))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_snapshot_that_is_not_restored_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a snapshot that is not restored gives other logits."""
    broken: list[bool] = []

    def copy(self: StateStore, source: int | None, target: int) -> None:
        _copy(self, None if broken else source, target)

    monkeypatch.setattr(StateStore, "copy", copy)
    executor = _executor(name)
    first, _, _ = _prompts()
    _generate(executor, _admit(executor, "a", first), first, 1)
    broken.append(True)
    second = [*first[:32], 7]
    b = _admit(executor, "b", second)
    assert b.num_cached_tokens == 32
    got, want = _prefill(executor, b, second), drive.reference_logits(name, second)[-1]
    assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


_copy = StateStore.copy


@pytest.mark.parametrize(
    ("name", "use_prefix"),
    [
        pytest.param(name, use_prefix, marks=pytest.mark.slow if (i + use_prefix) % 2 else ())
        for i, name in enumerate(STATEFUL)
        for use_prefix in (False, True)
    ],
)
def test_a_preempted_sequence_goes_on_as_if_it_had_not_been(name: str, use_prefix: bool) -> None:
    executor = _executor(name)
    first, _, other = _prompts()
    a, b = _admit(executor, "a", first, use_prefix), _admit(executor, "b", other)
    known = [*first, *_generate(executor, a, first, 5)]
    row = _prefill(executor, b, other)
    executor.preempt("a", a.cache_id)
    a = _admit(executor, "a", known, use_prefix)
    assert bool(a.num_cached_tokens) is use_prefix
    _check(name, executor, first, known[len(first) :] + _generate(executor, a, known, NEW - 5))
    beside = [int(row.argmax())]
    for position in range(len(other), len(other) + 3):
        beside.append(int(_step(executor, b.cache_id, beside[-1:], position).argmax()))
    _check(name, executor, other, beside)
    for cache_id in (a.cache_id, b.cache_id):
        executor.release_cache(cache_id)
    assert executor.kv_capacity_snapshot().used_blocks == 0


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_states_are_given_back(name: str) -> None:
    """Many prompts later, all slots taken by snapshots, nothing is in use and the memory stays."""
    executor, _ = drive.executor(name, host=True, block_size=BLOCK, chunk=64, budget=64, max_num_seqs=4)
    executor.prepare_startup()
    rng = np.random.default_rng(0)
    held = []
    for i in range(120):
        prompt = rng.integers(0, VOCAB, 9).tolist()
        admission = _admit(executor, str(i), prompt)
        _generate(executor, admission, prompt, 2)
        executor.release_cache(admission.cache_id)
        if i in (60, 119):
            gc.collect()
            mx.clear_cache()
            held.append(mx.get_active_memory())
    assert executor.kv_capacity_snapshot().used_blocks == 0
    assert held[1] <= held[0] * 1.01


@pytest.mark.parametrize("host", [True, False])
def test_after_a_failed_step_a_state_is_lost_and_said_to_be(
    host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers are a step ahead: going on would give wrong ids without a word."""
    name = "qwen3_next"
    executor = _executor(name, host)
    first, _, _ = _prompts()
    a = _admit(executor, "a", first)
    _prefill(executor, a, first)
    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "close", _fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            _step(executor, a.cache_id, [3], len(first))
    with pytest.raises(ContractError, match="lost in a step that failed"):
        _step(executor, a.cache_id, [3], len(first))
    executor.release_cache(a.cache_id)
    again = _admit(executor, "a", first)
    assert again.num_cached_tokens == 0
    _check(name, executor, first, _generate(executor, again, first))


def _fail(self: StateStore) -> list[mx.array]:
    raise RuntimeError("no more memory")
