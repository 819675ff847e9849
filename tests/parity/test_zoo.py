"""Every mlx-lm model type we claim gives, paged and packed with others, the ids it gives alone.

The reference is mlx-lm's own model on its own caches, from weights built a second time. The engine
runs four prompts that enter at different steps, in chunks beside decodes, on two routes: `host`
(numpy's BLAS, as on Linux) and `pools` (MLX's own gather and attention).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx import zoo
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.state import StateStore
from ferrum_mlx.backends.zoo import VOCAB
from ferrum_mlx.batch import LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, CacheCompletion, KvSlotRequest
from ferrum_mlx.errors import ContractError, UnsupportedModelError
from ferrum_mlx.kv.manager import KVManager

from . import drive
from .nearties import compare, faults

TOLERANCE = 1e-3  # of the reference's largest logit
NAMES = list(zoo.EXACT)


def _in_turn(cases: Sequence[object], first: int = 0) -> list[object]:
    """(name, case) of all names and cases; of each name one, in turn from `first` on, is not slow."""
    return [
        pytest.param(name, case, marks=() if j == (i + first) % len(cases) else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for j, case in enumerate(cases)
    ]


def _check_ids(name: str, executor: MLXExecutor, outputs: list[list[int]]) -> list[str]:
    def ours(ids: list[int]) -> np.ndarray:
        return _logits(executor, ids)

    def theirs(ids: list[int]) -> np.ndarray:
        return drive.reference_logits(name, ids)[-1]

    pairs = zip(drive.prompts(), outputs, drive.reference_ids(name), strict=True)
    return faults([compare(prompt, got, want[: len(got)], ours, theirs) for prompt, got, want in pairs])


def _logits(executor: MLXExecutor, ids: list[int]) -> np.ndarray:
    """Our logits behind `ids`, alone, in chunks of 7."""
    admission = executor.try_admit_prefill("near-tie", ids, use_prefix=False)
    assert isinstance(admission, Admitted)
    cache_id, row = admission.cache_id, None
    for start in range(0, len(ids), 7):
        row = _step(executor, (cache_id, ids[start : start + 7], start, False))[0]
    executor.release_cache(cache_id)
    assert row is not None
    return row[-1]


def _step(executor: MLXExecutor, *parts: tuple[int, list[int], int, bool]) -> list[np.ndarray]:
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


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_worth_comparing(name: str) -> None:
    """Ids vary, differ between prompts, and the last logits tell a change far back in the prompt."""
    outputs = drive.reference_ids(name)
    assert len({token for output in outputs for token in output}) >= 12
    assert len({tuple(output) for output in outputs}) == len(outputs)
    prompt = drive.prompts()[0]
    changed = [(prompt[0] + 1) % VOCAB, *prompt[1:]]
    last, other = (drive.reference_logits(name, ids)[-1] for ids in (prompt, changed))
    assert np.abs(last - other).max() > 10 * TOLERANCE * np.abs(last).max()


def _run_point(name: str, host: bool, point: int, table: dict[str, str]) -> None:
    block_size, chunk, budget = drive.GRID[point]
    where = f"{'host' if host else 'pools'}, block size {block_size}, chunk {chunk}"
    executor, config = drive.executor(name, host=host, block_size=block_size, chunk=chunk, budget=budget)
    if point == 0 or name in zoo.LOOPED:  # which modules are looped is found out then
        executor.prepare_startup()
        _check_route(name, executor)
    holders = drive.scatter_blocks(executor) if point == 1 else []
    run = drive.run_engine(executor, config)
    for cache_id in holders:
        executor.release_cache(cache_id)
    wrong = _check_ids(name, executor, run.outputs)
    if wrong:
        table[name] = f"differs ({where})"
    table.setdefault(name, "exact")
    assert wrong == [], where
    assert run.mixed_steps >= 3
    assert executor.kv_capacity_snapshot().used_blocks == 0


def _check_route(name: str, executor: MLXExecutor) -> None:
    """A model does not fall silently from paged attention to one sequence at a time."""
    off = [text for text in executor.capabilities().off if text.startswith("many sequences in one call")]
    expected = [zoo.LOOPED[name][0]] if name in zoo.LOOPED else []
    assert len(off) == len(expected)
    assert all(text in said for text, said in zip(expected, off, strict=True))


@pytest.mark.parametrize(("name", "point"), _in_turn(range(len(drive.GRID)), first=1))
def test_ids_equal_mlx_lm(name: str, point: int, zoo_table: dict[str, str]) -> None:
    _run_point(name, True, point, zoo_table)


@pytest.mark.parametrize(("name", "point"), _in_turn(range(len(drive.GRID))))
def test_ids_equal_mlx_lm_on_pools(name: str, point: int, zoo_table: dict[str, str]) -> None:
    _run_point(name, False, point, zoo_table)


@pytest.mark.parametrize(("name", "host"), _in_turn((True, False)))
def test_logits_and_verify_rows(name: str, host: bool) -> None:
    """Chunks, decodes and verify rows of two sequences in one forward; then a rejected draft's rollback.

    A state can do neither of the last two, and refuses them.
    """
    executor, _ = drive.executor(name, host=host, block_size=8, chunk=7, budget=24)
    if name in zoo.LOOPED:
        executor.prepare_startup()
    a, b = drive.prompts()[0], drive.prompts()[3]
    drafts, others = [11, 150, 73, 4, 98], [60, 22, 181]
    caches = []
    for request_id, prompt in (("a", a), ("b", b)):
        admission = executor.try_admit_prefill(request_id, prompt)
        assert isinstance(admission, Admitted)
        caches.append(admission.cache_id)
    differences = []

    def check(rows: np.ndarray, ids: list[int]) -> None:
        want = drive.reference_logits(name, ids)[-len(rows) :]
        differences.append(float(np.abs(rows - want).max() / np.abs(want).max()))

    check(_step(executor, (caches[1], b[:18], 0, False))[0], b[:18])
    for start in range(0, 35, 7):
        check(_step(executor, (caches[0], a[start : start + 7], start, False))[0], a[: start + 7])
    last_a, last_b = _step(executor, (caches[0], a[35:], 35, False), (caches[1], b[18:], 18, False))
    check(last_a, a)
    check(last_b, b)
    if executor.recurrent_state_spec():
        assert not executor.capabilities().speculative_decoding
        with pytest.raises(ContractError, match="state"):
            _step(executor, (caches[0], drafts, 37, True))
        row, beside = _step(executor, (caches[0], drafts, 37, False), (caches[1], [5], 19, False))
        check(row, a + drafts)
        check(beside, [*b, 5])
        with pytest.raises(ContractError, match="state"):
            executor.truncate_kv(caches[0], 39)
    else:
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


@pytest.mark.parametrize(("name", "host"), _in_turn((True, False), first=1))
def test_drafts_change_nothing(name: str, host: bool) -> None:
    """Drafts beside chunks and decodes, two of three right: the ids stay mlx-lm's."""
    executor, config = drive.executor(name, host=host, block_size=8, chunk=7, budget=48)
    if not executor.capabilities().speculative_decoding:
        assert executor.recurrent_state_spec()  # which test_logits_and_verify_rows sees refused
        return
    if name in zoo.LOOPED:
        executor.prepare_startup()
    run = drive.run_engine(executor, config, answers=drive.reference_ids(name))
    assert _check_ids(name, executor, run.outputs) == []
    assert run.drafted > run.accepted >= 16
    assert executor.kv_capacity_snapshot().used_blocks == 0


# Controls


def _shared_slots(self: KVManager, cache_id: int, group: int, start: int, end: int) -> np.ndarray:
    """A block table that all sequences have in common."""
    return np.arange(start, end, dtype=np.int32) + self.block_size


def _shared_states(self: StateStore) -> list[mx.array]:
    """As if all sequences had one state."""
    new = _close(self)
    first, *others = self._slots
    for slot in others:
        self.copy(first, slot)
    return new


_close = StateStore.close


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 3 else ()) for i, name in enumerate(NAMES)]
)
def test_shared_memory_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails, and so does the check at load, if sequences share their memory."""
    executor, config = drive.executor(name, host=True, block_size=8, chunk=7, budget=24)
    monkeypatch.setattr(KVManager, "slot_mapping", _shared_slots)
    if executor.recurrent_state_spec():
        monkeypatch.setattr(StateStore, "close", _shared_states)
    with pytest.raises(UnsupportedModelError, match="logits"):
        executor.prepare_startup()
    run = drive.run_engine(executor, config, new_tokens=6)
    monkeypatch.undo()
    assert _check_ids(name, executor, run.outputs) != []
    assert executor.kv_capacity_snapshot().used_blocks == 0


def _load(name: str) -> None:
    executor, _ = drive.executor(name, host=True, block_size=8, chunk=7, budget=24)
    executor.prepare_startup()


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_refused_by_name(name: str, zoo_table: dict[str, str]) -> None:
    """One line that names the type and the reason, whatever the model did with our cache objects."""
    reason = zoo.REFUSED[name][0]
    zoo_table[name] = "not refused"
    with pytest.raises(UnsupportedModelError) as caught:
        _load(name)
    message = str(caught.value)
    assert reason in message
    assert zoo.model_type(name) in message
    assert "\n" not in message
    zoo_table[name] = f"refused: {caught.value.what}"


@pytest.mark.slow
def test_the_survey_of_a_machine_finds_what_the_tables_say() -> None:
    """What `doctor --zoo` prints."""
    found = {name: exact for name, exact, _ in zoo.survey("cpu")}
    assert found == dict.fromkeys(zoo.EXACT, True) | dict.fromkeys(zoo.REFUSED, False)
