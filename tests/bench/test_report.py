"""Statistics, ratios, and that Markdown, CSV and JSON say the same."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from ferrum_mlx.bench.checks import Check
from ferrum_mlx.bench.report import VERSION, Report, spread
from ferrum_mlx.bench.runner import Results

ENGINE: dict[str, object] = {
    "model": "tiny",
    "backend": "mlx",
    "device": "cpu",
    "dtype": "float32",
    "numerics": "fast",
    "quantization": "none",
    "quality": "",
    "parameter_bytes": 540_000_000,
    "kv_pool_bytes": 1_000_000,
    "peak_rss_bytes": 900_000_000,
    "speculation_why": "",
}


@pytest.fixture
def report() -> Report:
    results = Results(
        runs={
            ("tg8", 1, "peer"): {0: {"decode_tps": 10.0, "itl_p50_s": 0.1}, 1: {"decode_tps": 16.0}},
            ("tg8", 1, "ferrum-mlx"): {
                0: {"decode_tps": 20.0, "itl_p50_s": 0.05},
                1: {"decode_tps": 24.0},
                2: {"decode_tps": 25.0},
            },
            ("pp64", 4, "ferrum-mlx"): {0: {"prefill_tps": 200.0, "ttft_s": 2.0}},
            ("pp64", 4, "peer"): {0: {"prefill_tps": 100.0, "ttft_s": 5.0}},
        },
        methods={
            ("tg8", 1, "peer"): "generate",
            ("tg8", 1, "ferrum-mlx"): "",
            ("pp64", 4, "ferrum-mlx"): "",
            ("pp64", 4, "peer"): "all at once",
        },
        checks={"ids": Check("ids", "near-tie", "at output 3")},
        skipped={("edit", 1, "peer"): "it failed: OSError"},
    )
    return Report(
        results=results,
        ours="ferrum-mlx",
        machine={"cpu": "a cpu", "cores": 2, "threads": 1, "system": "Linux x86_64"},
        engine=ENGINE,
        settings={"tool": "ferrum-mlx 0", "reps": 3, "seed": 7},
        absent={"llama.cpp": "not installed"},
        bandwidth=17e9,
    )


def test_a_spread_is_the_sample_s() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert (found.n, found.mean, found.median, found.min, found.max) == (3, 3.0, 2.0, 1.0, 6.0)
    assert found.sd == pytest.approx(7**0.5)
    assert spread([4.0]).sd == 0.0


def test_a_ratio_is_of_one_repetition_and_above_1_where_ours_is_better(report: Report) -> None:
    decode, prefill = report.ratios
    assert (decode.test, decode.system) == ("tg8", "peer")
    assert decode.figures["decode_tps"].values == (2.0, 1.5)  # not of 25, which has no partner
    assert list(decode.figures) == ["decode_tps"]  # percentiles are told, not compared
    assert prefill.figures["prefill_tps"].values == (2.0,)
    assert prefill.figures["ttft_s"].values == (2.5,)  # theirs ÷ ours


def test_no_partner_no_ratio(report: Report) -> None:
    del report.results.runs["tg8", 1, "ferrum-mlx"]
    assert [line.test for line in report.ratios] == ["pp64"]


def test_ours_stands_first(report: Report) -> None:
    assert [(line.test, line.system) for line in report.lines] == [
        ("tg8", "ferrum-mlx"),
        ("tg8", "peer"),
        ("pp64", "ferrum-mlx"),
        ("pp64", "peer"),
    ]


def test_the_object_has_what_its_version_promises(report: Report) -> None:
    told = json.loads(report.as_json())
    assert list(told) == [
        "version",
        "tool",
        "complete",
        "machine",
        "engine",
        "bandwidth_bytes_per_s",
        "settings",
        "checks",
        "absent",
        "skipped",
        "results",
        "ratios",
    ]
    assert (told["version"], told["tool"], told["complete"]) == (VERSION, "ferrum-mlx 0", True)
    assert told["settings"] == {"reps": 3, "seed": 7}
    assert told["absent"] == [{"peer": "llama.cpp", "why": "not installed"}]
    assert told["skipped"] == [{"test": "edit", "streams": 1, "system": "peer", "why": "it failed: OSError"}]
    assert told["checks"] == [{"name": "ids", "outcome": "near-tie", "detail": "at output 3"}]
    assert told["results"][0]["figures"]["decode_tps"]["values"] == [20.0, 24.0, 25.0]


def test_all_three_forms_have_the_same_figures(report: Report) -> None:
    told = json.loads(report.as_json())
    as_json = {
        (line["test"], line["system"], name): found
        for line in told["results"]
        for name, found in line["figures"].items()
    }
    as_json |= {(r["test"], r["system"], f"ratio {r['figure']}"): r for r in told["ratios"]}
    rows = list(csv.DictReader(io.StringIO(report.as_csv())))
    assert {(row["test"], row["system"], row["figure"]) for row in rows} == set(as_json)
    for row in rows:
        found = as_json[row["test"], row["system"], row["figure"]]
        for column in ("n", "mean", "sd", "median", "min", "max"):
            assert float(row[column]) == found[column]
    text = report.as_markdown()
    ours = as_json["tg8", "ferrum-mlx", "decode_tps"]
    assert f"{ours['mean']:.1f} ± {ours['sd']:.1f} ({ours['median']:.1f})" in text
    ratio = as_json["tg8", "peer", "ratio decode_tps"]
    (line,) = [line for line in text.splitlines() if line.startswith("| tg8") and "decode tok/s" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "peer generate"
    assert cells[3:] == [
        f"{ratio['median']:.2f}",
        f"{ratio['mean']:.2f} ± {ratio['sd']:.2f}",
        "1.50 to 2.00",
        "2",
    ]


def test_markdown_is_made_of_tables_with_equal_columns(report: Report) -> None:
    for block in report.as_markdown().split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in rows}) <= 1
    assert "pp64 × 4" in report.as_markdown()


def test_what_is_absent_left_out_or_cut_short_is_said(report: Report) -> None:
    text = report.as_markdown()
    assert "absent: llama.cpp, not installed" in text
    assert "left out: edit on peer, it failed: OSError" in text
    assert "ids: near-tie, at output 3" in text
    assert "17.0 GB/s" in text
    assert "interrupted" not in text
    cut: Any = replace(report, complete=False, engine=ENGINE | {"speculation_why": "it does not pay"})
    assert "interrupted" in cut.as_markdown()
    assert "nothing was guessed: it does not pay" in cut.as_markdown()
    assert json.loads(cut.as_json())["complete"] is False


def test_nothing_measured_is_still_a_report(report: Report) -> None:
    empty = replace(report, results=Results(), bandwidth=0.0)
    assert "a cpu" in empty.as_markdown()
    assert json.loads(empty.as_json())["bandwidth_bytes_per_s"] is None
