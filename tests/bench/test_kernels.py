"""Attention alone, kernel beside gathering: on a Mac as it is, elsewhere a tiny shape, for the report."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import mlx.core as mx
import pytest

from ferrum_mlx.backends.mlx.kernels.launch import MetalAttention
from ferrum_mlx.bench import kernels
from ferrum_mlx.bench.kernels import Shape
from ferrum_mlx.errors import BackendUnavailableError, FerrumError

from ..metal_shim.shim import METAL, any_kernel, needs_kernels

TINY = Shape(2, 1, 8, (1, 2), (3, 20))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernels, "CALLS", 2)
    monkeypatch.setattr(kernels, "bandwidth", lambda backend, device: 1e9)
    return kernels.report(
        2, lambda what: None, device="a shim", shape=TINY, make=lambda: MetalAttention(any_kernel)
    )


@needs_kernels
def test_every_system_at_every_size_in_every_form(report: Any) -> None:
    told = json.loads(report.as_json())
    lines = [(line["test"], line["streams"], line["system"]) for line in told["results"]]
    systems = {1: ["kernel", "gather", "slice"], 2: ["kernel", "gather"]}
    assert lines == [
        (f"{context} keys", batch, system)
        for batch in (1, 2)
        for context in (3, 20)
        for system in systems[batch]
    ]
    figures = told["results"][-1]["figures"]  # two sequences of 20 keys
    assert [len(figure["values"]) for figure in figures.values()] == [2, 2, 2]
    for seconds, speed, share in zip(*(figure["values"] for figure in figures.values()), strict=True):
        assert speed == pytest.approx(2 * 20 * (8 + 8) * 2 / seconds)  # K and V in two bytes each
        assert share == pytest.approx(speed / 1e9)
    ratios = {(line["test"], line["streams"], line["system"]): line["figure"] for line in told["ratios"]}
    assert ratios == {line: "call_s" for line in lines if line[2] != "kernel"}
    table = report.as_markdown()
    assert re.search(r"^\| test +\| system \| call µs +\| read GB/s \| of bandwidth \|$", table, re.MULTILINE)
    assert "attention alone, 2 query heads over 1 KV heads of 8 on mlx, a shim, float16" in table
    rows = list(csv.DictReader(io.StringIO(report.as_csv())))
    assert {row["figure"] for row in rows} == {
        "call_s",
        "read_bytes_per_s",
        "bandwidth_fraction",
        "ratio call_s",
    }


@needs_kernels
def test_a_kernel_that_computes_something_else_is_not_measured() -> None:
    class Wrong(MetalAttention):
        def __call__(self, *given: Any) -> mx.array:
            return super().__call__(*given) + 1

    with pytest.raises(FerrumError, match="the kernel computes something else: 1 rows over up to 83 keys"):
        kernels.report(1, print, device="a shim", shape=TINY, make=lambda: Wrong(any_kernel))


@pytest.mark.parametrize(("device", "why"), [("", "there is no Metal GPU here"), ("cpu", "--device cpu")])
def test_without_metal_it_is_refused(device: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match=f"--kernels: {why}, and the kernels run nowhere else"):
        kernels.on_this_mac(device, 1, print)


@pytest.mark.skipif(not METAL, reason="there is no Metal GPU here")
def test_on_a_mac_it_measures() -> None:
    found = kernels.on_this_mac("gpu", 1, print)
    assert all(line.figures["call_s"].mean > 0 for line in found.lines)
