"""States by slot: batches that stay together, rows that leave them, copies that are values."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from ferrum_mlx.backends.mlx.state import StateStore
from ferrum_mlx.errors import ContractError


def run(store: StateStore, slots: tuple[int, ...], rows: list[list[float]]) -> mx.array:
    """One step of one layer with a single entry: what it held, and then `rows`."""
    cache = store.open(0, slots)
    held = cache[0]
    cache[0] = mx.array(rows)
    mx.eval(store.close())
    return held


def held(store: StateStore, slot: int) -> list[list[float]] | None:
    """Without changing it."""
    store.copy(slot, 99)
    cache = store.open(0, (99,))
    store.close()
    return None if cache[0] is None else cache[0].tolist()


@pytest.fixture
def store() -> StateStore:
    store = StateStore([1])
    for slot in (1, 2, 3):
        store.copy(None, slot)
        assert held(store, slot) is None
        run(store, (slot,), [[float(slot)]])
    return store


def test_slots_that_run_together_stay_one_batch(store: StateStore) -> None:
    assert run(store, (1, 2, 3), [[10], [20], [30]]).tolist() == [[1], [2], [3]]
    batch = store._slots[1][0].entries[0]
    assert run(store, (1, 2, 3), [[11], [21], [31]]) is batch
    assert run(store, (2, 3), [[22], [32]]).tolist() == [[21], [31]]
    assert [held(store, slot) for slot in (1, 2, 3)] == [[[11]], [[22]], [[32]]]
    assert run(store, (3, 1), [[33], [13]]).tolist() == [[32], [11]]
    assert [held(store, slot) for slot in (1, 2, 3)] == [[[13]], [[22]], [[33]]]


def test_a_copy_does_not_follow_its_source(store: StateStore) -> None:
    run(store, (1, 2), [[10], [20]])
    store.copy(2, 7)
    run(store, (1, 2), [[11], [21]])
    assert held(store, 7) == [[20]]
    store.copy(7, 3)
    run(store, (3, 7), [[5], [6]])
    assert [held(store, slot) for slot in (1, 2, 3, 7)] == [[[11]], [[21]], [[5]], [[6]]]


def test_a_slot_that_begins_anew_leaves_its_batch(store: StateStore) -> None:
    run(store, (1, 2), [[10], [20]])
    store.copy(None, 2)
    assert held(store, 2) is None
    run(store, (2,), [[9]])
    assert run(store, (1, 2), [[11], [12]]).tolist() == [[10], [9]]


def test_nobody_keeps_a_batch_or_a_chunk_for_one_row() -> None:
    store, row = StateStore([1]), 1 << 16  # floats: well over what MLX lets a view waste
    before = mx.get_active_memory()
    for slot in range(8):
        store.copy(None, slot)
        cache = store.open(0, (slot,))
        cache[0] = mx.zeros((1, 20 * row))[:, -row:]  # the end of a chunk
        mx.eval(store.close())
        del cache
    cache = store.open(0, tuple(range(8)))
    cache[0] = cache[0] + 1
    mx.eval(store.close())
    del cache
    for slot in range(8):  # each leaves
        cache = store.open(0, (slot,))
        cache[0] = cache[0] + slot
        mx.eval(store.close())
    del cache
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 9 * row * 4


def test_lengths_that_differ_are_told_apart(store: StateStore) -> None:
    run(store, (2,), [[1.0, 2.0]])
    assert store.shapes(1) == store.shapes(3) == ((1,),)
    assert store.shapes(2) == ((2,),)


def test_a_layer_that_runs_twice_or_was_lost_is_refused(store: StateStore) -> None:
    store.open(0, (1, 2))
    with pytest.raises(ContractError, match="runs twice"):
        store.open(0, (2, 3))
    store.reset()
    with pytest.raises(ContractError, match="lost in a step that failed"):
        store.open(0, (1,))
    store.copy(None, 1)
    assert held(store, 1) is None
