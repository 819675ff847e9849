"""`ferrum-mlx verify`: the table, the object, and the exit code of a fault."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ferrum_mlx import build
from ferrum_mlx.backends import selfcheck
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.cli.main import cli
from ferrum_mlx.verify.runs import Subject

from ..unit.test_imports import HEAVY, loaded_by
from ..unit.verify_subjects import BROKEN, forget_snapshots, stateful, subject

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = ("verify", "--backend", "fake")


def test_a_table_on_stdout_and_progress_on_stderr(ferrum: Run) -> None:
    done = ferrum(*FAKE)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split("  ")[0] == "check"
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "paged = dense",
        "paged = library's generate",
        "batched = alone",
    ]
    assert "not applicable: the fake backend has no library" in lines[1]
    said = done.stderr.splitlines()
    assert said[0].startswith("fake on fake, none (asked for by --backend: no model, scripted text)")
    assert "the plain run: each prompt alone" in said
    assert f"1 of {len(lines)}: paged = dense" in said
    assert said[-1].startswith("0 faults, 8 checks hold, 5 did not run; numerics fast, 10 prompts × 8 tokens")


def test_one_object(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--json", "--numerics", "exact")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ok"], told["backend"], told["numerics"]) == (True, "fake", "exact")
    assert {check["outcome"] for check in told["checks"]} == {"exact", "consistent", "not applicable"}


def test_the_model_by_either_name(refused: Callable[..., str]) -> None:
    assert "two models are named" in refused(*FAKE, "one", "-m", "two", code=2)


def test_what_cannot_be_checked_is_a_line(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--no-prefix-cache")
    assert done.returncode == 0
    assert "refused: --no-prefix-cache" in done.stdout


def test_events_are_written(ferrum: Run, tmp_path) -> None:
    assert ferrum(*FAKE, "--events", "log.jsonl").returncode == 0
    kinds = {json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()}
    assert {"preempted", "resumed", "step"} <= kinds


def verify(broken: Subject, monkeypatch: pytest.MonkeyPatch, *args: str):
    monkeypatch.setattr(build, "build_subject", lambda config, narrate: broken)
    return CliRunner().invoke(cli, ["verify", *args])


def test_fast_paths_that_are_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = subject("fake")
    capabilities = replace(slow.executor.capabilities(), off=("paged kernel: wrong here",))
    monkeypatch.setattr(slow.executor, "capabilities", lambda: capabilities)
    done = verify(slow, monkeypatch, "--json")
    assert json.loads(done.stdout)["off"] == ["paged kernel: wrong here"]
    assert "fast path off: paged kernel: wrong here" in done.stderr.splitlines()


@pytest.mark.parametrize("backend", ["fake", "mlx-host"])
@pytest.mark.parametrize(("break_it", "check"), BROKEN.items())
def test_a_fault_exits_1(
    backend: str, break_it: Callable[[Subject], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = subject(backend)
    break_it(broken)
    done = verify(broken, monkeypatch)
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{check} ")]
    assert "fault: " in line
    assert not done.stderr.splitlines()[-1].startswith("0 faults")


def test_a_lost_snapshot_exits_1_and_the_object_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = stateful()
    forget_snapshots(broken)
    done = verify(broken, monkeypatch, "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["ok"] is False
    (fault,) = [check for check in told["checks"] if check["outcome"] == "fault"]
    assert fault["check"] == "snapshot hit = miss"
    assert fault["first_difference"].keys() == {"prompt", "step", "ours", "theirs", "gap", "delta"}


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['ferrum-mlx', 'verify', '--help']\n"
        "from ferrum_mlx.cli.main import main; main()"
    )
    assert loaded_by(code) & (HEAVY | {"textual"}) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "bits"), [("mlx", 8), ("mlx", 4), ("torch", 8)])
def test_the_default_model_with_quantized_kv(smollm2: ResolvedModel, backend: str, bits: int) -> None:
    pytest.importorskip(backend)
    args = [
        "verify",
        "-m",
        str(smollm2.path),
        "--backend",
        backend,
        "--device",
        "cpu",
        "--kv-bits",
        str(bits),
    ]
    done = CliRunner().invoke(cli, [*args, "--numerics", "exact", "--json"])
    assert done.exit_code == 0, done.stdout + done.stderr
    outcomes = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert outcomes["quantized KV = the model's"] == "within its bound"
    same_route = ("batched = alone", "chunked = whole", "prefix hit = miss", "preempted = not")
    assert {outcomes[name] for name in (*same_route, "speculation = plain")} == {"exact"}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_of_other_slots_exit_1(
    smollm2: ResolvedModel, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelihood tells, which the checks of equality do not: they are wrong alike on both sides."""
    from ferrum_mlx.backends.mlx.host_quantized import HostPool

    true = HostPool.__getitem__
    monkeypatch.setattr(selfcheck, "check_all", lambda executor, storages: None)
    monkeypatch.setattr(HostPool, "__getitem__", lambda self, where: np.roll(true(self, where), 1, axis=0))
    args = ["verify", "-m", str(smollm2.path), "--backend", "mlx", "--device", "cpu", "--kv-bits", str(bits)]
    done = CliRunner().invoke(cli, [*args, "--json"])
    assert done.exit_code == 1, done.stdout + done.stderr
    outcomes = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert outcomes["quantized KV = the model's"] == "fault"


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_default_model(smollm2: ResolvedModel, numerics: str) -> None:
    args = ["verify", "-m", str(smollm2.path), "--backend", "mlx", "--device", "cpu", "--numerics", numerics]
    done = CliRunner().invoke(cli, [*args, "--json"])
    assert done.exit_code == 0, done.stdout + done.stderr
    outcomes = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    same_route = "exact" if numerics == "exact" else "equal ids"
    assert outcomes == {
        "paged = dense": "equal ids",
        "paged = library's generate": "equal ids",
        "batched = alone": same_route,
        "chunked = whole": same_route,
        "prefix hit = miss": same_route,
        "snapshot hit = miss": "not applicable",
        "preempted = not": same_route,
        "speculation = plain": same_route,
        "seed alone = beside others": same_route,
        "logprobs = the logits'": "consistent",
        "adapters together = dense": "not applicable",
        "quantized KV = the model's": "not applicable",
        "no pool is copied": "not applicable",
    }
