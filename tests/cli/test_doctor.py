from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ferrum_mlx import build, memory
from ferrum_mlx.cli import doctor, doctor_facts
from ferrum_mlx.errors import BackendUnavailableError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


NEEDED = {
    *("ferrum-mlx", "python", "platform", "mlx", "mlx-lm", "torch", "transformers", "textual"),
    *("huggingface-hub", "backend", "backend_reason", "device", "matmul", "fast_paths", "fast_paths_off"),
    *("numpy_blas", "threads", "memory", "memory_limits", "cache", "hub_cache", "default_model", "sessions"),
    *("settings", "offline", "hub", "terminal", "terminal_names"),
}


def test_facts_as_text_and_as_json(ferrum: Run) -> None:
    done = ferrum("doctor", "--json", HF_HUB_OFFLINE="1", SSH_CONNECTION="1 2 3 4", TERM="dumb")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.keys() >= NEEDED
    assert all(isinstance(value, str) and value for value in facts.values())
    assert not [value for value in facts.values() if value.startswith("not available")]
    assert facts["offline"] == "yes, by HF_HUB_OFFLINE"
    assert "over ssh" in facts["terminal"]
    assert "1 2 3 4" not in done.stdout  # whose address it is, is nobody's business
    assert "TERM=dumb" in facts["terminal_names"]
    assert len(facts) <= 40  # one screen


def test_a_line_a_fact_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: object) -> None:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket, "getaddrinfo", called)
    monkeypatch.setattr(socket.socket, "connect", called)
    sections = [section for section in doctor_facts.SECTIONS if section.__name__ != "_device"]  # slow
    monkeypatch.setattr(doctor_facts, "SECTIONS", sections)
    lines = CliRunner().invoke(doctor.doctor, []).stdout.splitlines()
    of_device = {"device", "matmul", "fast_paths", "fast_paths_off"}
    assert {line.split()[0] for line in lines} >= NEEDED - of_device
    assert not [line for line in lines if "not available" in line]


@pytest.mark.parametrize("broken", doctor_facts.SECTIONS)
def test_a_broken_part_says_so_and_the_others_are_there(
    broken: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> dict[str, str]:
        raise OSError("it is broken\nhere")

    fails.__name__ = broken.__name__
    shown = [section for section in doctor_facts.SECTIONS if section.__name__ != "_device"]  # slow
    sections = tuple(fails if section is broken else section for section in {*shown, broken})
    monkeypatch.setattr(doctor_facts, "SECTIONS", sections)
    done = CliRunner().invoke(doctor.doctor, ["--json"])
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert facts[broken.__name__.strip("_")] == "not available: OSError: it is broken here"
    assert len(facts) > len(sections)


def test_what_is_absent_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(wanted: str) -> tuple[str, str]:
        raise BackendUnavailableError("the package mlx is not installed", next_step="install it")

    monkeypatch.setattr(build, "choose_backend", absent)
    monkeypatch.setattr(doctor_facts, "PACKAGES", ("surely-not-installed",))
    facts = json.loads(CliRunner().invoke(doctor.doctor, ["--json"]).stdout)
    said = "not available: BackendUnavailableError: the package mlx is not installed; install it"
    assert facts["backend"] == facts["device"] == said
    assert facts["surely-not-installed"] == "not installed"
    assert "memory" in facts


def test_the_cache_is_measured_and_links_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRUM_CACHE", str(tmp_path / "cache"))
    assert "not there yet" in doctor_facts._cache()["cache"]
    (tmp_path / "cache").mkdir()
    with open(tmp_path / "cache" / "blob", "wb") as blob:
        blob.truncate(1_500_000_000)  # a hole: it takes no room
    (tmp_path / "cache" / "link").symlink_to("blob")
    assert "1.5 GB used, " in doctor_facts._cache()["cache"]


def test_a_cache_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_facts._folder(tmp_path).endswith(" free")
    (tmp_path / "file").write_text("x")
    assert doctor_facts._folder(tmp_path / "file").endswith("file, which is no folder")
    for kind, said in (
        (os.W_OK, "free, which cannot be written"),
        (os.R_OK, "which cannot be read: permission"),
    ):
        monkeypatch.setattr(doctor_facts.os, "access", lambda _, mode, kind=kind: not mode & kind)
        assert said in doctor_facts._folder(tmp_path)


def test_what_a_library_prints_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def _loud() -> dict[str, str]:
        print("Error importing something")
        return {"loud": "yes"}

    monkeypatch.setattr(doctor_facts, "SECTIONS", (_loud, doctor_facts._terminal))
    done = CliRunner().invoke(doctor.doctor, ["--json"])
    assert json.loads(done.stdout)["loud"] == "yes"
    assert "Error importing something" in done.stderr


def test_a_password_in_the_hubs_address_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "https://me:secret@hub.example/models")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example")
    said = doctor_facts._network()["hub"]
    assert said == "https://hub.example/models, through HTTPS_PROXY"


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "limits", lambda: {"/sys/fs/cgroup/memory.max": 2_000_000_000})
    monkeypatch.setattr(memory, "metal_limit", lambda: 16_000_000_000)
    said = doctor_facts._memory()["memory_limits"]
    assert said.startswith("2.0 GB by /sys/fs/cgroup/memory.max, 16.0 GB wired for Metal")


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
