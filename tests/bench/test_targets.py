"""The table of README's figures: read from what the commands print, and honest about what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ferrum_mlx.bench import targets
from ferrum_mlx.bench.targets import COMMANDS, RANDOM, Row


def report(**settings: Any) -> dict[str, Any]:
    ratios = [
        {"test": "tg128 @ d128", "streams": 1, "figure": "decode_tps", "values": [1.1, 1.3, 1.2]},
        {"test": "tg128 @ d128", "streams": 8, "figure": "decode_tps", "values": [9.0]},
        {"test": "tg128 @ d2048", "streams": 1, "figure": "decode_tps", "values": [0.9, 0.8, 0.7]},
    ]
    engine = {"parameter_bytes": 200e6, "kv_pool_bytes": 100e6, "peak_rss_bytes": 650e6}
    results = [{"figures": {"outside_forward": {"values": [0.01, 0.02]}}}, {"figures": {}}]
    return {"ratios": ratios, "engine": engine, "results": results, **settings}


def run(monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], *args: str) -> tuple[Result, list[list[str]]]:
    asked: list[list[str]] = []

    def child(name: str, command: list[str]) -> dict[str, Any]:
        asked.append(command)
        return said

    monkeypatch.setattr(targets, "_run", child)
    return CliRunner().invoke(targets.main, args, catch_exceptions=False), asked


def test_the_table_says_what_was_met_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, report(), "--only", "mlx-decode")
    assert result.stdout.splitlines()[2:] == [
        "| MLX, one stream, decode ÷ mlx-lm, context 128 | at least 1 | 1.20 (1.10 to 1.30) | met |",
        "| MLX, one stream, decode ÷ mlx-lm, context 2,048 | at least 1 | 0.80 (0.70 to 0.90) | MISSED |",
        "| MLX, one stream: engine outside the forward, % | at most 3 | 1.50 (1.00 to 2.00) | met |",
        "| MLX: peak RSS beyond weights and KV pool, MB | at most 400 | 350.00 | met |",
    ]


def test_what_a_report_does_not_have_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, report(ratios=[]), "--only", "mlx-prefill")
    assert result.stdout.splitlines()[-1] == "| MLX, prefill of 512 ÷ mlx-lm | at least 1 | not measured | |"


def test_other_reports_have_their_own_form() -> None:
    rounds = {"one": [{"ours float32": 3.0, "ours packed": 6.0, "transformers float32": 2.0}], "eight": []}
    float32, packed, eight = COMMANDS["torch"][1]
    assert float32.line(rounds).endswith("| 1.50 | met |")
    assert packed.line(rounds).endswith("| 3.00 | met |")
    assert eight.line(rounds).endswith("| not measured | |")
    decode, ttft = COMMANDS["stock"][1]
    assert "MISSED" in decode.line({"decode_ratio": [2.0, 2.1]})
    assert "| 9.00 (8.50 to 9.50) | met |" in ttft.line({"ttft_ratio": [8.5, 9.5]})


def test_the_random_model_is_made_for_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(targets, "write", lambda folder: folder)
    _, [command] = run(monkeypatch, report(), "--only", "mlx-long")
    assert RANDOM not in command
    assert command[2].endswith("random")


def test_the_commands_can_be_read_without_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = run(monkeypatch, report(), "--list")
    assert not asked
    assert len(result.stdout.splitlines()) == len(COMMANDS)
    assert "torch: python -m ferrum_mlx.bench.torch_cpu --rounds 5" in result.stdout
    assert "llama.cpp: GOMP_SPINCOUNT=20000 python -m ferrum_mlx bench --backend torch" in result.stdout


def test_every_test_that_a_row_reads_is_one_that_its_command_runs() -> None:
    """A typing error would read as "not measured"."""
    from ferrum_mlx.bench.workloads import WORKLOADS, decode, prefill

    cases = [
        decode(128, 128, 1, 512),
        decode(128, 2048, 1, 512),
        prefill(512, 0, 1),
        decode(128, 8192, 1, 512),
    ]
    cases += [decode(64, depth, batch, 512) for depth, batch in ((128, 8), (128, 16), (128, 1), (2048, 1))]
    cases += [WORKLOADS[name]() for name in ("ragged", "admission")]
    figures = ("decode_tps", "prefill_tps", "output_tps", "longest_gap_s")
    lines = [
        {"test": case.name, "streams": case.streams, "figure": figure, "values": [1.0]}
        for case in cases
        for figure in figures
    ]
    said = report(ratios=lines)
    of_bench = [row for args, rows in COMMANDS.values() if "bench" in args for row in rows]
    assert [row.measure for row in of_bench if not row.pick(said)] == []


def test_a_bound_from_above() -> None:
    row = Row("MB", 400, lambda report: report["values"], at_most=True)
    assert row.line({"values": [401]}).endswith("MISSED |")


def test_the_random_model_is_one_that_both_backends_read(tmp_path: Path) -> None:
    from mlx_lm.utils import load

    from ferrum_mlx import checkpoint
    from ferrum_mlx.bench.random_model import CONTEXT, write

    folder = write(tmp_path / "m")
    model, tokenizer = load(str(folder))
    assert model.args.max_position_embeddings == CONTEXT > 8192 + 32
    assert tokenizer.decode(tokenizer.encode("caf\u00e9")) == "caf\u00e9"
    checkpoint.check_folder(folder)
