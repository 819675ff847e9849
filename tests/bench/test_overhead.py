"""The arithmetic of the bench, and that it measures decode steps only."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from ferrum_mlx.bench import overhead
from ferrum_mlx.metrics import KVUsage, StepStats
from ferrum_mlx.sampling import SamplingParams


def test_figures_are_milliseconds() -> None:
    kv = KVUsage(16, 1, 0)
    stats = [StepStats(kv=kv, schedule_s=s, forward_s=2 * s, commit_s=3 * s) for s in (0.001, 0.002, 0.004)]
    figures = overhead.figures_of(list(zip((0.010, 0.030, 0.020), stats, strict=True)))
    assert figures == {"median_ms": 20, "p99_ms": 30, "schedule_ms": 2, "forward_ms": 4, "commit_ms": 6}


@pytest.mark.parametrize(("median", "word"), [(2.0, "met: at most 2"), (2.1, "MISSED: at most 2")])
def test_the_target_stands_beside_the_figure(median: float, word: str) -> None:
    parts = {"schedule_ms": 0.1, "forward_ms": 0.1, "commit_ms": 0.1, "p99_ms": 3.0}
    assert word in overhead.line_of({"running": 64, "context": 100, "median_ms": median, **parts}, 2.0)


def test_every_request_decodes_in_every_step_that_counts() -> None:
    measured = overhead.measure(running=5, context=40, steps=20)
    assert len(measured) == 20
    assert {(s.decode_tokens, s.prefill_tokens, s.running) for _, s in measured} == {(5, 0, 5)}


def test_a_step_that_is_none_of_these_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(**params: object) -> SamplingParams:
        return SamplingParams(max_tokens=25, ignore_eos=True)

    monkeypatch.setattr(overhead, "SamplingParams", short)
    with pytest.raises(click.ClickException, match="no decode of 2 requests"):
        overhead.measure(running=2, context=40, steps=20)


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "TARGETS_MS", {1: 1e9, 3: 0.0})
    monkeypatch.setattr(overhead, "CONTEXTS", (20, 50))
    result = CliRunner().invoke(overhead.main, ["--steps", "3"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert [(run["running"], run["context"]) for run in last["runs"]] == [(1, 20), (1, 50), (3, 20), (3, 50)]
    assert set(last["growth"]) == {"1", "3"}
    assert ("met" in result.stdout, "MISSED" in result.stdout) == (True, True)
