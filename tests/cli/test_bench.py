"""`ferrum-mlx bench`: what is printed where, what is refused, and when it fails."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ferrum_mlx import build
from ferrum_mlx.bench import checks
from ferrum_mlx.bench.checks import EQUAL, FAULT, Check
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.cli.main import cli
from ferrum_mlx.errors import FerrumError, UsageError

from ..unit.test_imports import HEAVY, loaded_by
from ..unit.verify_subjects import corrupt_block_tables, subject
from .conftest import WAIT

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = ("bench", "--backend", "fake")
SMALL = (*FAKE, "--pp", "32", "--tg", "4", "--reps", "2")


def test_tables_on_stdout_and_progress_on_stderr(ferrum: Run) -> None:
    done = ferrum(*SMALL, "--batch", "1,2", "--depth", "0,64")
    assert done.returncode == 0, done.stderr
    tests = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "| ferrum-mlx" in line]
    shapes = ["", " × 2", " @ d64", " @ d64 × 2"]
    assert tests == [f"{name}{shape}" for name in ("pp32", "tg4") for shape in shapes]
    assert "greedy ids = the model's own forward: equal ids" in done.stdout
    said = done.stderr.splitlines()
    assert said[0].startswith("fake on fake, none (asked for by --backend: no model, scripted text)")
    assert "warm-up: pp32 × 2, ferrum-mlx" in said
    assert said[-1] == "2 of 2: pp32, ferrum-mlx"  # backwards


def test_the_default_is_llama_bench_s(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--reps", "1", "--json")
    assert [line["test"] for line in json.loads(done.stdout)["results"]] == ["pp512", "tg128"]


def test_one_object(ferrum: Run) -> None:
    done = ferrum(*SMALL, "--json", "--seed", "5")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["engine"]["backend"] == "fake"
    assert told["settings"] == {"reps": 2, "seed": 5}
    assert all(len(line["figures"]["peak_memory_bytes"]["values"]) == 2 for line in told["results"])


def test_rows_for_a_spreadsheet(ferrum: Run) -> None:
    done = ferrum(*SMALL, "--format", "csv")
    assert {"prefill_tps", "decode_tps"} <= {
        row["figure"] for row in csv.DictReader(io.StringIO(done.stdout))
    }


def test_every_workload_runs_and_speculation_is_compared(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--workload", "all", "--reps", "1", "--speculative", "ngram", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    names = ["staggered", "ragged", "shared-prefix", "multi-turn", "admission", "edit", "code", "chat"]
    assert list(dict.fromkeys(line["test"] for line in told["results"])) == names
    pairs = {line["test"]: line["n"] for line in told["ratios"] if line["system"] == "without speculation"}
    assert pairs == {"edit": 1, "code": 1, "chat": 10}
    assert {check["outcome"] for check in told["checks"]} == {"equal ids"}


def test_absent_peers_are_named(ferrum: Run) -> None:
    done = ferrum(*SMALL, "--vs", "llama.cpp,http://127.0.0.1:9", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    llama, server = [line for line in done.stdout.splitlines() if line.startswith("- absent: ")]
    assert llama.startswith("- absent: llama.cpp, ")
    assert "no server answers at http://127.0.0.1:9/v1/models" in server


def test_what_does_not_fit_is_one_line(refused: Callable[..., str]) -> None:
    assert "--max-model-len" in refused(*FAKE, "--pp", "512", "--max-model-len", "64", code=2)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--pp", "0"), "'0'; allowed: whole numbers of at least 1"),
        (("--batch", "1,x"), "'1,x'; allowed: whole numbers"),
        (("--tg", "1"), "at least 2"),
        (("--workload", "dance"), "--workload 'dance'; allowed: staggered, "),
        (("--vs", "ollama"), "--vs 'ollama'; allowed: mlx-lm, transformers, llama.cpp, or the URL"),
        (("--reps", "0"), "0 is not in the range"),
        (("--plot", "chart.pdf"), "--plot chart.pdf; allowed: a name that ends in .png or .svg"),
        (("one", "-m", "two"), "two models are named"),
        (("--watch",), "--watch needs a terminal, and stdin or stderr is none"),
        (("--pp", "8", "--depth", "64", "--no-prefix-cache"), "needs the prefix cache"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(build, "build_subject")
    with pytest.raises((UsageError, click.UsageError)) as caught:
        cli.main([*FAKE, *args], standalone_mode=False)
    assert said in str(caught.value)


REFUSED_BESIDE_KERNELS = {
    ("some-model",): "MODEL",
    ("-m", "some-model"): "--model",
    ("--watch",): "--watch",
    ("--depth", "0"): "--depth",  # also where it is what the default is
    ("--backend", "torch", "--kv-bits", "8"): "--backend, --kv-bits",
    ("--adapter", "a=b", "--use-adapter", "a"): "--adapter, --use-adapter",
    ("--seed", "0", "--batch", "2"): "--batch, --seed",
    ("--no-prefix-cache",): "--no-prefix-cache",
    ("--prefix-cache",): "--prefix-cache",
}


@pytest.mark.parametrize(("args", "named"), REFUSED_BESIDE_KERNELS.items())
def test_what_has_no_meaning_beside_kernels_is_refused_by_name(
    args: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferrum_mlx.cli.bench._run_kernels", lambda *args: pytest.fail("it ran"))
    with pytest.raises(UsageError) as caught:
        cli.main(["bench", "--kernels", "--reps", "2", *args], standalone_mode=False)
    assert {said.removesuffix(",") for said in caught.value.what.split()[2:]} == set(named.split(", "))
    assert caught.value.what.startswith("--kernels beside ")


@pytest.mark.parametrize(("form", "asked"), [(["--format", "csv"], "csv"), (["--json"], "json")])
def test_what_has_a_meaning_beside_kernels(
    form: list[str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr("ferrum_mlx.cli.bench._run_kernels", lambda *args: ran.append(args))
    for more, called in (((), ("", 5, asked)), (("--reps", "2", "--device", "gpu"), ("gpu", 2, asked))):
        cli.main(["bench", "--kernels", *form, *more], standalone_mode=False)
        assert ran.pop() == called


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ferrum_mlx", *SMALL, "--reps", "100000", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("3 of"):
        pass
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=WAIT)
    assert process.returncode == 130, said
    told = json.loads(out)
    assert (told["complete"], {line["test"] for line in told["results"]}) == (False, {"pp32", "tg4"})


def bench(monkeypatch: pytest.MonkeyPatch, found: Any, *args: str) -> Any:
    monkeypatch.setattr(build, "build_subject", lambda config, narrate: found)
    return CliRunner().invoke(cli, ["bench", "--pp", "8", "--tg", "4", "--reps", "1", *args])


@pytest.mark.parametrize("backend", ["fake", "mlx-host"])
def test_what_computes_something_else_fails(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(monkeypatch, subject(backend)).exit_code == 0
    broken = subject(backend)
    corrupt_block_tables(broken)
    done = bench(monkeypatch, broken)
    assert isinstance(done.exception, FerrumError)
    assert (done.exception.exit_code, done.stdout) == (1, "")
    assert "the model's own forward: fault" in str(done.exception)
    assert "so nothing is measured" in str(done.exception)


def test_speculation_that_changes_the_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_ids(subject: Any, name: str, *ids: Any) -> Check:
        return Check(name, FAULT if "ngram" in name else EQUAL, "at output 3")

    monkeypatch.setattr(checks, "same_ids", same_ids)
    args = ["--workload", "edit", "--reps", "1", "--speculative", "ngram"]
    assert cli.main([*FAKE, *args], standalone_mode=False) == 1


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['ferrum-mlx', 'bench', '--help']\n"
        "from ferrum_mlx.cli.main import main; main()"
    )
    assert loaded_by(code) & (HEAVY | {"textual", "matplotlib"}) == set()


@pytest.mark.slow
def test_the_default_model_beside_mlx_lm(smollm2: ResolvedModel) -> None:
    args = ["bench", str(smollm2.path), "--backend", "mlx", "--device", "cpu", "--offline", "--json"]
    shapes = ["--pp", "16", "--tg", "4", "--batch", "1,2", "--reps", "1", "--vs", "mlx-lm"]
    done = CliRunner().invoke(cli, [*args, *shapes])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {check["outcome"] for check in told["checks"]} == {"equal ids"}
    assert [line["method"] for line in told["results"] if line["system"] == "mlx-lm"] == [
        "generate",
        "BatchGenerator",
    ] * 2
    assert told["results"][-2]["figures"]["bandwidth_fraction"]["mean"] > 0
