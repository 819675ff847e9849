"""Where a sequence's keys lie in a pool changes nothing: in one run, in a few, or in many places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends import step
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.step import Run

from .conftest import BACKENDS, Build, tiny_config
from .driver import FULL, admit, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140, 3, 3, 91, 200, 45, 6, 17]
KINDS = {"decode": 1, "verify": 3, "decodes": 1}  # rows; several sequences in "decodes"


def logits_of(executor: PagedExecutor, kind: str, sequences: int) -> np.ndarray:
    """[rows, vocab] of the first of so many sequences, whose blocks were taken in turns."""
    caches = [admit(executor, PROMPT) for _ in range(sequences)]
    for start in range(0, len(PROMPT), 4):
        for cache in caches:
            run(executor, item(cache, PROMPT[start : start + 4], start, is_final_chunk=False))
    rows = [9, 8, 7][: KINDS[kind]]
    last = [item(cache, rows, len(PROMPT), logits=FULL, verify=len(rows) > 1) for cache in caches]
    logits = run(executor, *(last if kind == "decodes" else last[:1]))[0].logits
    for cache in caches:
        executor.release_cache(cache)
    assert logits is not None
    return logits


@pytest.mark.parametrize("least", [1, 1000], ids=["in place", "gathered"])
def test_keys_in_many_places_are_read_as_those_in_one(
    build: Build, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "LONG_RUN", least)
    alone, beside = build(), build()
    for kind in KINDS:
        np.testing.assert_allclose(logits_of(beside, kind, 2), logits_of(alone, kind, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("mlx-host", "decode"), ("mlx-host", "decodes"), ("torch-plain", "decode"), ("torch-plain", "verify")],
)
def test_keys_are_read_in_place(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it shows when whole blocks are read from the first one's place."""
    if backend not in BACKENDS:
        pytest.skip("torch is not installed: pip install 'ferrum-mlx[torch]'")
    original = step.Step.key_runs

    def swapped(*args: Any) -> list[Run]:
        runs = original(*args)
        return [replace(run, slots=runs[0].slots) if run.end - run.start == 4 else run for run in runs]

    executor = BACKENDS[backend](tiny_config(), 40)
    executor.prepare_startup()
    if backend == "torch-plain":
        executor.slow_down(kernel=True)  # type: ignore[attr-defined]
    want = logits_of(executor, kind, 1)
    monkeypatch.setattr(step, "LONG_RUN", 1)
    monkeypatch.setattr(step.Step, "key_runs", swapped)
    assert np.abs(logits_of(executor, kind, 2) - want).max() > 0.1


def test_what_nobody_wrote_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a sequence's last block, where MLX's CPU route gathers whole blocks."""
    monkeypatch.setattr(step, "LONG_RUN", 1000)
    executor = BACKENDS["mlx-host"](tiny_config(), 40)
    executor.prepare_startup()
    want = logits_of(executor, "decodes", 2)
    for storage in executor._packed.storages:  # type: ignore[attr-defined]
        storage.keys[:] = storage.values[:] = np.nan
    np.testing.assert_allclose(logits_of(executor, "decodes", 2), want, atol=1e-4)
