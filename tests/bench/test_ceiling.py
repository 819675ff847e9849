"""Bytes of a step and the share of the bandwidth; threads; that a measurement measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_mlx.bench import ceiling, machine, workloads
from ferrum_mlx.model_info import MemoryRequirements

MEMORY = MemoryRequirements(parameter_bytes=1000, kv_bytes_per_token=2, kv_pool_bytes=0)


def test_a_step_reads_the_weights_and_every_stream_s_kv() -> None:
    case = workloads.decode(100, 50, 4, 512)
    found = ceiling.step_figures(case, MEMORY, {"decode_tps": 40.0}, 20_000.0)
    assert found["step_bytes"] == 1000 + 4 * 2 * (50 + 100 / 2)
    assert found["kv_bytes"] == 4 * 2 * 150
    assert found["bandwidth_fraction"] == pytest.approx(10 * 1800 / 20_000)  # ten steps a second
    with_states = ceiling.step_figures(case, replace(MEMORY, state_bytes=30), {"decode_tps": 40.0}, 20_000.0)
    assert with_states["step_bytes"] == found["step_bytes"] + 4 * 30


def test_only_a_decode_has_such_a_step() -> None:
    assert ceiling.step_figures(workloads.prefill(100, 0, 1), MEMORY, {"prefill_tps": 1.0}, 1.0) == {}
    assert ceiling.step_figures(workloads.decode(8, 0, 1, 512), MEMORY, {}, 1.0) == {}


def test_threads_are_those_the_blas_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert ceiling.num_threads("mlx") == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert ceiling.num_threads("mlx") == 2
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ceiling.num_threads("mlx") >= 1


def test_the_buffer_is_read_and_the_best_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 4.0] + [10.0, 12.0] + [20.0, 23.0] * 5)
    monkeypatch.setattr(ceiling, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(ceiling, "perf_counter", lambda: next(moments))
    assert ceiling.bandwidth("mlx", "cpu") == 4096 / 2.0


def test_torch_reads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(ceiling, "BUFFER_BYTES", 4096)
    assert ceiling.bandwidth("torch", "cpu") > 0
    assert ceiling.num_threads("torch") == torch.get_num_threads()


def test_a_machine_is_described_without_its_name() -> None:
    import platform

    facts = machine.facts("mlx")
    assert facts["cpu"]
    assert not [value for value in facts.values() if platform.node() and platform.node() in str(value)]
    assert machine.peak_rss() > 10 << 20
