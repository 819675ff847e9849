from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

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


def test_zoo_prints_a_line_a_type_and_counts_a_type_by_its_worst(monkeypatch, capsys) -> None:
    from click.testing import CliRunner

    from ferrum_mlx import build
    from ferrum_mlx.cli.doctor import doctor

    rows = [("llama", "exact"), ("llama/b", "refused: x"), ("llama/c", "exact"), ("mamba", "exact; off")]
    monkeypatch.setattr(build, "zoo_survey", lambda: iter(rows))
    shown = CliRunner().invoke(doctor, ["--zoo"])
    assert [line.split(maxsplit=1) for line in shown.stdout.splitlines()] == [list(row) for row in rows]
    assert "1 of mlx-lm's model types are exact here, 1 are refused" in shown.stderr
    as_json = CliRunner().invoke(doctor, ["--zoo", "--json"])
    assert json.loads(as_json.stdout) == {"llama": "refused: x", "mamba": "exact; off"}
