"""Every transformers model type we claim gives, paged and packed with others, the ids it gives alone.

The reference is transformers' own `generate` with eager attention and its own cache, from weights built
a second time. The engine runs four prompts that enter at different steps, in chunks beside decodes, in
fast and in exact numerics.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

from collections.abc import Sequence

import numpy as np
import torch

from ferrum_mlx.backends.torch import zoo
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.zoo import VOCAB
from ferrum_mlx.batch import LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, CacheCompletion, KvSlotRequest
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UnsupportedModelError, UsageError
from ferrum_mlx.kv.manager import KVManager

from . import drive, torch_reference
from .nearties import compare, faults

TOLERANCE = 1e-3  # of the reference's largest logit
NAMES = list(zoo.EXACT)
NEW_TOKENS = drive.NEW_TOKENS
NUMERICS = ("fast", "exact")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _executor(
    name: str, numerics: str, block_size: int, chunk: int, budget: int, max_model_len: int = 128
) -> tuple[TorchExecutor, EngineConfig]:
    config = EngineConfig(
        numerics=numerics,
        block_size=block_size,
        max_prefill_chunk=chunk,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )
    return TorchExecutor(zoo.build(name), zoo.info(name), config, free_memory=2**28), config


def _step(executor: TorchExecutor, *parts: tuple[int, list[int], int, bool]) -> list[np.ndarray]:
    """One forward of (cache, ids, start, every row wanted); the rows' logits."""
    items = [
        UnifiedItem(
            cache_id=c, q_tokens=tuple(ids), pos_offset=start, verify=verify, logits=LogitsPolicy.FULL
        )
        for c, ids, start, verify in parts
    ]
    executor.reserve_kv_slots([KvSlotRequest(i.cache_id, i.pos_offset + len(i.q_tokens)) for i in items])
    rows = []
    for result in executor.batch_prefill(items):
        assert result.logits is not None
        assert result.token_ids == tuple(result.logits.argmax(-1))
        rows.append(result.logits)
    return rows


def _admit(executor: TorchExecutor, prompt: Sequence[int], request_id: str) -> int:
    admission = executor.try_admit_prefill(request_id, prompt, use_prefix=False)
    assert isinstance(admission, Admitted)
    return admission.cache_id


def _logits(executor: TorchExecutor, ids: list[int], cuts: Sequence[int] = (), beside: int = 0) -> np.ndarray:
    """The logits behind `ids`, cut at `cuts`, beside neighbours that decode."""
    others = [_admit(executor, [i + 1], f"other {i}") for i in range(beside)]
    cache_id = _admit(executor, ids, "ids")
    for step, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(ids)], strict=True)):
        decoding = [(other, [50 + step], step, False) for other in others]
        row = _step(executor, *decoding, (cache_id, ids[start:end], start, False))[-1]
    for used in (*others, cache_id):
        executor.release_cache(used)
    return row[-1]


def _check_ids(name: str, executor: TorchExecutor, outputs: list[list[int]]) -> list[str]:
    def ours(ids: list[int]) -> np.ndarray:
        return _logits(executor, ids, range(7, len(ids), 7))

    def theirs(ids: list[int]) -> np.ndarray:
        return torch_reference.logits(name, ids)[-1]

    pairs = zip(drive.prompts(), outputs, torch_reference.ids(name), strict=True)
    return faults([compare(prompt, got, want[: len(got)], ours, theirs) for prompt, got, want in pairs])


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_worth_comparing(name: str) -> None:
    """Ids vary, differ between prompts, and the last logits tell a change past any window."""
    outputs = torch_reference.ids(name)
    assert {len(output) for output in outputs} == {NEW_TOKENS}
    assert len({token for output in outputs for token in output}) >= 12
    assert len({tuple(output) for output in outputs}) == len(outputs)
    prompt = drive.prompts()[0]
    changed = list(prompt)
    changed[-20] = (prompt[-20] + 1) % VOCAB  # 19 back is within the reach of four windows of 8
    last, other = (torch_reference.logits(name, ids)[-1] for ids in (prompt, changed))
    assert np.abs(last - other).max() > 10 * TOLERANCE * np.abs(last).max()


def _some(every: int, first: int = 0) -> list[object]:
    """All names; but for one in so many they are slow."""
    return [
        pytest.param(name, marks=() if i % every == first else pytest.mark.slow)
        for i, name in enumerate(NAMES)
    ]


def _in_turn() -> list[object]:
    """Of each name one point of the grid and one of the numerics, in turn; the rest is slow."""
    cases = [(point, numerics) for point in range(len(drive.GRID)) for numerics in NUMERICS]
    return [
        pytest.param(name, *case, marks=() if j == i % len(cases) else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for j, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("name", "point", "numerics"), _in_turn())
def test_ids_equal_transformers(name: str, point: int, numerics: str) -> None:
    executor, config = _executor(name, numerics, *drive.GRID[point])
    executor.prepare_startup()
    holders = drive.scatter_blocks(executor) if point == 1 else []
    run = drive.run_engine(executor, config)
    for cache_id in holders:
        executor.release_cache(cache_id)
    assert _check_ids(name, executor, run.outputs) == []
    assert run.mixed_steps >= 3
    assert executor.kv_capacity_snapshot().used_blocks == 0
    assert [why for why in executor.capabilities().off if not why.startswith("replayed steps")] == []


@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        pytest.param(name, numerics, marks=() if (i + j) % 4 == 0 else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for j, numerics in enumerate(NUMERICS)
    ],
)
def test_drafts_change_nothing(name: str, numerics: str) -> None:
    """Drafts beside chunks and decodes, two of three right: the ids stay transformers'."""
    executor, config = _executor(name, numerics, 8, 7, 48)
    run = drive.run_engine(executor, config, answers=torch_reference.ids(name))
    assert _check_ids(name, executor, run.outputs) == []
    assert run.drafted > run.accepted >= 16
    assert executor.kv_capacity_snapshot().used_blocks == 0


@pytest.mark.parametrize("name", _some(2, first=1))
def test_logits_and_verify_rows(name: str) -> None:
    """Chunks, decodes and verify rows of two sequences in one forward; then a rejected draft's rollback."""
    executor, _ = _executor(name, "fast", 8, 7, 24)
    executor.prepare_startup()
    a, b = drive.prompts()[0], drive.prompts()[3]
    drafts, others = [11, 150, 73, 4, 98], [60, 22, 181]
    caches = [_admit(executor, a, "a"), _admit(executor, b, "b")]
    differences = []

    def check(rows: np.ndarray, ids: list[int]) -> None:
        want = torch_reference.logits(name, ids)[-len(rows) :]
        differences.append(float(np.abs(rows - want).max() / np.abs(want).max()))

    check(_step(executor, (caches[1], b[:18], 0, False))[0], b[:18])
    for start in range(0, 35, 7):
        check(_step(executor, (caches[0], a[start : start + 7], start, False))[0], a[: start + 7])
    last_a, last_b = _step(executor, (caches[0], a[35:], 35, False), (caches[1], b[18:], 18, False))
    check(last_a, a)
    check(last_b, b)
    rows, beside = _step(executor, (caches[0], drafts, 37, True), (caches[1], [5], 19, False))
    check(rows, a + drafts)
    check(beside, [*b, 5])
    executor.truncate_kv(caches[0], 39)  # two of five stay
    rows, beside = _step(executor, (caches[0], others, 39, True), (caches[1], [6, 7], 20, True))
    check(rows, a + drafts[:2] + others)
    check(beside, [*b, 5, 6, 7])
    check(_step(executor, (caches[0], [9], 42, False))[0], [*a, *drafts[:2], *others, 9])
    for request_id, cache_id in zip("ab", caches, strict=True):
        executor.complete_cache(CacheCompletion(request_id, cache_id, 0, 0))
    assert executor.kv_capacity_snapshot().used_blocks == 0
    assert max(differences) <= TOLERANCE, differences


@pytest.mark.parametrize("name", _some(2))
def test_exact_numerics_hold_to_the_bit(name: str) -> None:
    executor, _ = _executor(name, "exact", 8, 64, 64)
    executor.prepare_startup()
    assert executor.notes == []
    prompt = drive.prompts()[0]
    whole = _logits(executor, prompt)
    for cuts, beside in (((), 3), ((8, 16, 30), 0), ((36,), 0), ((7, 36), 3)):
        np.testing.assert_array_equal(_logits(executor, prompt, cuts, beside), whole)


def test_fast_numerics_do_not_and_the_test_above_could_tell() -> None:
    executor, _ = _executor("llama", "fast", 8, 64, 64)
    executor.prepare_startup()
    prompt = drive.prompts()[0]
    whole, cut = _logits(executor, prompt), _logits(executor, prompt, (36,))
    assert not np.array_equal(whole, cut)
    np.testing.assert_allclose(whole, cut, atol=1e-4 * np.abs(whole).max())


# Controls


def _shared_slots(self: KVManager, cache_id: int, group: int, start: int, end: int) -> np.ndarray:
    """A block table that all sequences have in common."""
    return np.arange(start, end, dtype=np.int32) + self.block_size


@pytest.mark.parametrize("name", _some(4))
def test_shared_memory_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails, and so does the check at load, if sequences share their memory."""
    executor, config = _executor(name, "fast", 8, 7, 24)
    monkeypatch.setattr(KVManager, "slot_mapping", _shared_slots)
    with pytest.raises(UnsupportedModelError, match="logits"):
        executor.prepare_startup()
    run = drive.run_engine(executor, config, new_tokens=6)
    monkeypatch.undo()
    assert _check_ids(name, executor, run.outputs) != []


@pytest.mark.slow
def test_the_survey_of_a_machine_finds_what_the_tables_say() -> None:
    """What `doctor --zoo` prints."""
    found = {name: exact for name, exact, _ in zoo.survey("cpu")}
    assert found == dict.fromkeys([*zoo.EXACT, *zoo.BOUNDED], True) | dict.fromkeys(zoo.REFUSED, False)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_refused_by_name(name: str) -> None:
    """One line that names the type and the reason."""
    reason = zoo.REFUSED[name][0]
    with pytest.raises(UnsupportedModelError) as caught:
        _executor(name, "fast", 8, 64, 64)[0].prepare_startup()
    message = str(caught.value)
    assert reason in message
    assert zoo.model_type(name) in message
    assert "\n" not in message


# Rotary embeddings that look at the longest sequence of a batch


@pytest.mark.parametrize(("name", "ceiling"), [("phi3/longrope", 32), ("llama/dynamic", 512)])
def test_positions_that_depend_on_the_longest_sequence_are_bounded(name: str, ceiling: int) -> None:
    with pytest.raises(UsageError, match=f"at most {ceiling}"):
        _executor(name, "fast", 8, 64, 64, max_model_len=ceiling + 1)
    config = EngineConfig(block_size=8)
    executor = TorchExecutor(zoo.build(name), zoo.info(name), config, free_memory=2**28)
    assert executor.max_model_len == ceiling
    assert any("longest sequence" in note for note in executor.notes) is (ceiling < 512)


def test_unequal_lengths_below_the_bound_equal_transformers() -> None:
    """One sequence up to the original length beside a short one: each turns as it does alone."""
    name = "phi3/longrope"
    executor, _ = _executor(name, "fast", 8, 64, 64, max_model_len=32)
    executor.prepare_startup()
    a, b = drive.prompts()[0][:31], drive.prompts()[1]
    caches = [_admit(executor, a, "a"), _admit(executor, b, "b")]
    _step(executor, (caches[0], a, 0, False), (caches[1], b, 0, False))
    rows = _step(executor, (caches[0], [9], 31, False), (caches[1], [4], 5, False))
    for row, ids in zip(rows, ([*a, 9], [*b, 4]), strict=True):
        want = torch_reference.logits(name, ids)[-1]
        assert np.abs(row[-1] - want).max() <= TOLERANCE * np.abs(want).max()


def test_a_bound_that_is_overlooked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second guard: rows at far positions must turn as they do alone."""
    monkeypatch.setattr("ferrum_mlx.backends.torch.executor.rope_ceiling", lambda model: None)
    with pytest.raises(UnsupportedModelError, match="phi3 lets tokens of a batch change each other"):
        _executor("phi3/longrope", "fast", 8, 64, 64, max_model_len=64)
