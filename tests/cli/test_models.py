"""`ferrum-mlx models`: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ferrum_mlx import catalog, fit, hub, memory, weights_size
from ferrum_mlx.catalog import HubSource, ResolvedModel, cards
from ferrum_mlx.cli.models import models
from ferrum_mlx.errors import FerrumError

REPO = "tiny/model"


def run(*args: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(models, list(args), input=answer)


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """The whole program, in a process of its own."""
    program = "import sys; from ferrum_mlx.cli.main import main; sys.argv[0] = 'ferrum-mlx'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "models", *args],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ,
    )


def test_list_names_every_card_and_marks_the_default(private_cache: Path) -> None:
    result = run("list")
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["name", "here", "memory", "licence", "title"]
    assert [row.lstrip("* ").split()[0] for row in rows] == list(cards())
    assert [row.startswith("*") for row in rows] == [True] + [False] * (len(rows) - 1)
    assert all(" - " in row for row in rows)


@pytest.mark.parametrize(
    ("free", "said", "fits"),
    [(10**12, "✓ fits, 2.", True), (2_500_000_000, "≈ tight", True), (10**6, "✗ needs 2.", False)],
)
def test_list_says_what_fits(
    free: int, said: str, fits: bool, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: free)
    monkeypatch.setattr(fit, "route_here", lambda backend="": "packed")
    monkeypatch.setattr(weights_size, "find_spec", lambda name: None)  # K and V are float32, then
    (row,) = (line for line in run("list").stdout.splitlines() if "qwen3-0.6b" in line)
    assert said in row
    facts = json.loads(run("info", "qwen3-0.6b", "--json").stdout)
    assert (facts["fits"], facts["available_bytes"]) == (fits, free)
    assert facts["variants"] == ["qwen3-0.6b:safetensors", "qwen3-0.6b:mlx-4bit", "qwen3-0.6b:gguf"]
    assert json.loads(run("info", "qwen3-0.6b:gguf", "--json").stdout)["name"] == "qwen3-0.6b:gguf"


def test_what_nobody_knows_is_said(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "refusal", lambda status, backend: None)
    monkeypatch.setattr(fit, "fit_of", lambda status, backend: None)
    assert all("? unknown" in row for row in run("list").stdout.splitlines()[1:])
    assert json.loads(run("info", "--json").stdout)["fits"] is None
    assert "fits             -" in run("info").stdout


def test_what_a_backend_would_refuse_is_said(private_cache: Path) -> None:
    for backend, refused in (("torch", True), ("mlx", False)):
        (row,) = (line for line in run("list", "--backend", backend).stdout.splitlines() if "5-0.8b" in line)
        assert ("✗ refused, see info" in row) is refused
        facts = json.loads(run("info", "qwen3.5-0.8b", "--backend", backend, "--json").stdout)
        assert (facts["refused"] is not None, facts["fits"] is None) == (refused, refused)
        assert ("recurrent state 3 × " in (facts["memory"] or "")) is not refused
    assert "take --backend mlx" in run("info", "qwen3.5-0.8b", "--backend", "torch").stdout


def test_a_name_with_control_characters_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\nb.gguf").write_bytes(b"GGUF")
    shown = run("info", str(tmp_path / "a\x1b[31m\nb.gguf"))
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    assert len(shown.stdout.splitlines()) == len(json.loads(run("info", "--json").stdout))
    assert "is not a sound GGUF file" in shown.stdout


def test_each_backend_has_files_of_its_own(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = HubSource(repo=REPO, variant="mlx-4bit")
    card = replace(cards()["qwen3-8b"], sources=(HubSource(repo="maker/eight"), packed))
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"qwen3-8b": card})
    asked: list[str] = []
    monkeypatch.setattr(fit, "refusal", lambda status, backend: None)  # the files are no real ones
    monkeypatch.setattr(fit, "fit_of", lambda status, backend: asked.append(backend))
    assert run("pull", "qwen3-8b:mlx-4bit", "--backend", "mlx").exit_code == 0
    for options, here in (([], True), (["--backend", "mlx"], True), (["--backend", "torch"], False)):
        for facts in (
            json.loads(run("list", "--json", *options).stdout)[0],
            json.loads(run("info", "qwen3-8b", "--json", *options).stdout),
        ):
            assert (facts["name"], facts["cached"]) == ("qwen3-8b", here)
    assert asked == ["", "", "mlx", "mlx", "torch", "torch"]
    refused = run("pull", "qwen3-8b:mlx-4bit", "--backend", "torch")
    assert isinstance(refused.exception, FerrumError)
    assert "packed for MLX, which torch cannot read" in str(refused.exception)


def test_list_json(private_cache: Path) -> None:
    entries = json.loads(run("list", "--json").stdout)
    assert [entry["name"] for entry in entries] == list(cards())
    assert {entry["cached"] for entry in entries} == {False}
    assert [entry["verified"] for entry in entries if entry["default"]] == [True]


def test_pull_info_rm(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = run("pull", REPO)
    assert pulled.exit_code == 0
    path = Path(pulled.stdout.strip())
    assert (path / "config.json").exists()
    assert f"fetching {REPO} from hub {REPO}@main" in pulled.stderr

    info = json.loads(run("info", REPO, "--json").stdout)
    assert (info["cached"], info["path"], info["revision"]) == (True, str(path), fake_hub.REVISION)
    assert info["size"] == sum(file.stat().st_size for file in path.iterdir())
    assert f"path             {path}" in run("info", REPO).stdout
    assert any(entry["name"] == REPO for entry in json.loads(run("list", "--json").stdout))

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("ferrum_mlx.cli.models.sys", terminal)
    kept = run("rm", REPO, answer="n\n")
    assert kept.exit_code == 1
    assert path.exists()
    assert "Delete" in kept.stderr
    assert kept.stdout == ""
    assert run("rm", REPO, answer="y\n").exit_code == 0
    assert not path.exists()


def test_rm_yes_does_not_ask(fake_hub: Any) -> None:
    run("pull", REPO)
    removed = run("rm", REPO, "--yes")
    assert removed.exit_code == 0
    assert "102 kB are free again" in removed.stderr
    assert isinstance(run("rm", REPO, "--yes").exception, FerrumError)


def test_rm_without_a_terminal_names_yes(fake_hub: Any) -> None:
    path = Path(run("pull", REPO).stdout.strip())
    done = command("rm", REPO)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"ferrum-mlx: models rm {REPO} asks")
    assert done.stderr.endswith("add --yes\n")
    assert done.stderr.count("\n") == 1
    assert path.exists()


def test_the_default_model_is_meant_where_none_is_named(
    smollm2: ResolvedModel, empty_hub_cache: None
) -> None:
    assert Path(run("pull").stdout.strip()) == smollm2.path
    assert json.loads(run("info", "--json").stdout)["name"] == smollm2.name


def test_a_process_of_its_own_uses_the_hub_of_the_environment(fake_hub: Any) -> None:
    done = command("pull", REPO)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == fake_hub.REVISION
    assert "\x1b" not in done.stdout + done.stderr
    assert "%" not in done.stderr  # no progress bar where nobody sees one


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("pull", "--offline"), 2, "drop --offline"),
        (("pull", "no-such-model"), 1, "'no-such-model'"),
        (("pull", "tiny/other"), 1, "no repository tiny/other"),
        (("pull", "./none.gguf"), 1, "none.gguf"),
        (("pull", "."), 1, "no complete model"),
        (("rm", "qwen3-0.6b", "--yes"), 1, "not on this machine"),
        (("rm",), 2, "MODEL"),
        (("rm", "", "--yes"), 2, "no model is named"),
        (("info", "qwen3-0.6b:q9"), 2, "qwen3-0.6b:gguf"),
        (("info", "no-such-model"), 1, "see ferrum-mlx models list"),
    ],
)
def test_mistakes_are_one_line(args: tuple[str, ...], code: int, said: str, fake_hub: Any) -> None:
    done = command(*args)
    assert done.returncode == code
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert said in last
    assert last.startswith("ferrum-mlx: ")
    assert "Traceback" not in done.stderr
