"""The bench on a fake model whose clock goes by the tokens it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ferrum_mlx import build
from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.bench import admission, ours
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import Pending

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines over a fake that takes a second a token."""
    now = 0.0

    class Slow(FakeExecutor):
        def _launch(self, batch: UnifiedBatch) -> Pending:
            nonlocal now
            now += batch.num_tokens
            return super()._launch(batch)

    def make(**settings: Any) -> Engine:
        config = EngineConfig(**({"max_model_len": 2048} | settings))
        executor = Slow(config)
        executor.prepare_startup()
        return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test")

    monkeypatch.setattr(ours, "perf_counter", lambda: now)
    return make


def test_a_warm_prefix_costs_its_tail_alone(make: Make) -> None:
    warm, cold = admission.warm_and_cold(make(), 160, seed=0)
    assert (cold, warm) == (176.0, 16.0)


def test_warm_and_cold_are_checked_against_the_cache(make: Make) -> None:
    with pytest.raises(click.ClickException, match="of a prefix of 160 tokens 0 came"):
        admission.warm_and_cold(make(prefix_cache=False), 160, seed=0)
    engine = make()
    admission.warm_and_cold(engine, 160, seed=0)
    with pytest.raises(click.ClickException, match="never seen came from the cache"):
        admission.warm_and_cold(engine, 160, seed=0)


def test_a_pause_is_the_longest_gap_while_the_prompt_comes_in(make: Make) -> None:
    found = admission.pause(make(prefill_while_decoding=20), 200, streams=2, seed=0)
    assert (found.quiet_s, found.longest_s, found.gaps) == (2.0, 22.0, 11.0)
    assert (found.ttft_s, found.prefill_tps) == (220.0, 200 / 220)


def test_an_engine_that_alternates_pauses_for_the_whole_prompt(make: Make) -> None:
    engine = make(prefill_while_decoding=200, max_prefill_chunk=200, max_num_batched_tokens=202)
    found = admission.pause(engine, 200, streams=2, seed=0)
    assert (found.quiet_s, found.longest_s, found.ttft_s) == (2.0, 202.0, 202.0)


def test_nothing_is_left_behind(make: Make) -> None:
    engine = make()
    for seed in range(2):
        admission.pause(engine, 100, streams=3, seed=seed)
        assert engine.executor.kv_capacity_snapshot().used_blocks == 0


def test_the_last_line_is_json_and_targets_are_printed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[EngineConfig] = []

    def build_engine(config: EngineConfig) -> Engine:
        built.append(config)
        return make(**asdict(config))

    monkeypatch.setattr(build, "build_engine", build_engine)
    result = CliRunner().invoke(admission.main, ["--prefix", "400", "--runs", "2", "--streams", "3"])
    assert result.exit_code == 0, result.output
    as_it_is, alternating = built
    assert as_it_is == EngineConfig(max_model_len=as_it_is.max_model_len)  # the defaults, but for the room
    assert alternating.prefill_while_decoding == 400
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["warm_and_cold_ttft_s"] == [[16.0, 416.0]] * 2
    assert [run["longest_s"] for run in last["alternating"]] == [403.0] * 2
    assert "warm ÷ cold: 0.0385 (0.0385 to 0.0385); met: at most 0.05" in result.stdout
    assert "MISSED: at most 5" in result.stdout
