"""What `verify` and the check at load say of LoRA adapters, and that they find rows that go astray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ferrum_mlx.backends.step import Step
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.verify.checks import adapted, baseline
from ferrum_mlx.verify.compare import FAULT, Skipped

from .tiny_adapters import write_peft
from .verify_subjects import subject

SIZES = {f"model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in (0, 1)}
Groups = list[tuple[int, np.ndarray | None]]


def folders(tmp_path: Path) -> tuple[tuple[str, str], ...]:
    for seed, name in enumerate("ab"):
        write_peft(tmp_path / name, SIZES, seed)
    return tuple((name, str(tmp_path / name)) for name in "ab")


def test_adapters_together_are_checked_and_swapped_ones_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = baseline(subject("mlx-host", adapters=folders(tmp_path)))
    row = adapted(base)
    assert row.outcome in ("exact", "equal ids")
    assert "through 2 and none" in row.detail
    rows = Step.adapter_rows

    def swapped(self: Step, start: int = 0, end: int | None = None) -> Groups:
        return [({1: 2, 2: 1}[number], own) for number, own in rows(self, start, end)]

    monkeypatch.setattr(Step, "adapter_rows", swapped)
    assert adapted(base).outcome == FAULT


def test_without_adapters_there_is_nothing_to_check() -> None:
    with pytest.raises(Skipped, match="no adapter is loaded"):
        adapted(baseline(subject("fake")))


def test_a_step_that_ignores_adapters_is_found_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "adapter_rows", lambda self, start=0, end=None: [])
    with pytest.raises(UnsupportedModelError, match="is not exact through paged attention"):
        subject("mlx-host", adapters=folders(tmp_path))
