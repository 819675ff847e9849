from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ferrum_mlx import build
from ferrum_mlx.cli import doctor
from ferrum_mlx.errors import BackendUnavailableError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_facts_as_text_and_as_json(ferrum: Run) -> None:
    done = ferrum("doctor", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {"ferrum-mlx", "python", "platform", "mlx", "backend", "backend_reason", "memory"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    lines = ferrum("doctor").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(facts)


def test_what_is_absent_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: str = "") -> dict[str, str]:
        raise BackendUnavailableError("the package mlx is not installed", next_step="install it")

    monkeypatch.setattr(build, "doctor_facts", absent)
    monkeypatch.setattr(doctor, "_PACKAGES", ("surely-not-installed",))
    done = CliRunner().invoke(doctor.doctor, ["--json"])
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert facts["backend"] == "not available: the package mlx is not installed; install it"
    assert facts["surely-not-installed"] == "not installed"
    assert "memory" in facts


ZOOS = {
    "mlx": [("llama", True, ""), ("llama/b", False, "x"), ("llama/c", True, ""), ("mamba", True, "slow")],
    "torch": [("Klear", True, ""), ("llama", True, ""), ("mamba", False, "it keeps a state")],
}


def test_zoo_has_a_line_a_configuration_and_a_column_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "zoo_survey", lambda backend: iter(ZOOS[backend]))
    shown = CliRunner().invoke(doctor.doctor, ["--zoo"])
    assert [line.split(maxsplit=3) for line in shown.stdout.splitlines()] == [
        ["mlx", "torch"],
        ["Klear", "-", "exact"],
        ["llama", "exact", "exact"],
        ["llama/b", "refused", "-", "mlx refused: x"],
        ["llama/c", "exact", "-"],
        ["mamba", "exact", "refused", "mlx exact: slow; torch refused: it keeps a state"],
    ]
    starts = [re.search(r"torch|exact$", line).start() for line in shown.stdout.splitlines()[:3]]
    assert len(set(starts)) == 1
    assert "mlx: 1 model types of mlx-lm exact here, 1 refused" in shown.stderr
    assert "torch: 2 model types of transformers exact here, 1 refused" in shown.stderr


def test_zoo_as_json_has_a_type_by_its_worst_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "zoo_survey", lambda backend: iter(ZOOS[backend]))
    done = CliRunner().invoke(doctor.doctor, ["--zoo", "--json"])
    assert json.loads(done.stdout) == {
        "Klear": {"torch": "exact"},
        "llama": {"mlx": "refused: x", "torch": "exact"},
        "mamba": {"mlx": "exact: slow", "torch": "refused: it keeps a state"},
    }


@pytest.mark.parametrize("absent", ["mlx", "torch"])
def test_a_backend_that_is_not_installed_is_named_and_has_no_column(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(backend: str, part: str) -> SimpleNamespace:
        assert part == "zoo"
        return SimpleNamespace(survey=lambda: iter(ZOOS[backend]))

    monkeypatch.setattr(build, "find_spec", lambda name: None if name == absent else name)
    monkeypatch.setattr(build, "_backend", module)
    done = CliRunner().invoke(doctor.doctor, ["--zoo"])
    assert done.exit_code == 0
    assert done.stdout.split()[0] == ({*ZOOS} - {absent}).pop()
    assert absent not in done.stdout
    assert f"note: no column for {absent}: the package {absent} is not installed; pip install" in done.stderr
