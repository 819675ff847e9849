"""The check of a GPU: its part that needs none, and what it makes of figures, failures and lack of time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import torch
from click.testing import CliRunner

from ferrum_mlx.bench import device_check, device_runs
from ferrum_mlx.bench.device_check import Checks


def run_json(output: str) -> dict[str, Any]:
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run the check itself")
def test_without_a_gpu_the_routes_are_compared_on_the_cpu_and_no_speed_is_told() -> None:
    result = CliRunner().invoke(device_check.main, [])
    assert result.exit_code == 0, result.output
    found = run_json(result.output)
    assert device_check.NO_GPU in result.output
    assert not found["cuda"]
    assert not found["failed"]
    routes = [(run["route"], run["streams"]) for run in found["runs"]]
    assert routes == [(route, streams) for route in device_runs.ROUTES for streams in device_runs.STREAMS]
    assert all(set(run) == {"route", "streams", "ids"} for run in found["runs"])
    assert "bandwidth_gbps" not in found


def made_up(monkeypatch: pytest.MonkeyPatch, one: float, many: float) -> list[dict[str, Any]]:
    runs = [
        {
            "route": route,
            "streams": streams,
            "decode_tps": tps,
            "gbps": tps / streams * 6,
            "ids": "",
            "off": [],
        }
        for route in device_runs.ROUTES
        for streams, tps in zip(device_runs.STREAMS, (one, many), strict=True)
    ]
    monkeypatch.setattr(device_runs, "bandwidth", lambda: 1000.0)
    monkeypatch.setattr(device_runs, "all_runs", lambda on_gpu, left, kept: kept.extend(runs))
    return runs


@pytest.mark.parametrize(("one", "many", "said"), [(120, 1300, ["met", "met"]), (80, 790, ["MISSED"] * 2)])
def test_figures_are_held_against_the_targets(
    one: float,
    many: float,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_up(monkeypatch, one, many)
    checks = Checks(480)
    device_check._speed(checks, on_gpu=True)
    output = capsys.readouterr().out
    assert [line.split()[-1] for line in output.splitlines()[-2:]] == said
    assert checks.found["bandwidth_fraction"] == pytest.approx(one * 6 / 1000)
    assert checks.found["batch_speedup"] == pytest.approx(many / one)
    assert checks.finish() == 0  # a slow device computes rightly


def test_routes_that_differ_on_the_cpu_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 1, 1)[2]["ids"] = "other"
    checks = Checks(480)
    device_check._speed(checks, on_gpu=False)
    assert checks.found["failed"] == ["runs: the routes give different ids of 1 streams"]
    assert checks.finish() == 1


def test_a_section_that_fails_does_not_end_the_others_and_one_without_time_is_skipped() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    checks = Checks(100)
    assert checks.section("first", broken) is None
    assert checks.section("second", lambda: 3.0) == 3.0
    checks._end = time.perf_counter() + 1
    assert checks.section("third", lambda: 4.0) is None
    assert checks.found == {
        "failed": ["first: RuntimeError: no kernel image"],
        "skipped": ["third"],
        "second": 3.0,
    }


def test_what_hangs_is_left_when_the_budget_is_used_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(device_check.os, "_exit", codes.append)
    device_check._give_up(Checks(0))
    assert codes == [1]
    assert run_json(capsys.readouterr().out)["failed"] == ["time: the budget is used up"]


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runs, "kernel_difference", lambda kind: "off by 1" if kind.sinks else None)
    checks = Checks(480)
    outcomes = device_check._kernel(checks, on_gpu=True)
    assert outcomes["bfloat16 64/8 heads of 64/64 window 128 sinks"] == "off by 1"
    assert list(outcomes.values()).count("right") == len(device_runs.KINDS) - 1
    assert checks.found["failed"] == ["kernel, bfloat16 64/8 heads of 64/64 window 128 sinks: off by 1"]
