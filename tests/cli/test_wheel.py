"""The wheel: what is in it, and that it works in a clean environment, far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ferrum_mlx", "tui", "models")
PACKAGES = {"ferrum_mlx": "ferrum_mlx", "tui": "ferrum_tui", "models": "ferrum_models"}
ENV = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed; no variable of this run's Python leaks into it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | ENV
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / "src").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "src" / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        folder / "out",
        folder / "src",
        cwd=folder,
    )
    [built] = (folder / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and what it depends on, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return folder / "venv/bin"


def test_no_package_is_forgotten() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            found.add(".".join([package, *file.parent.relative_to(ROOT / folder).parts]))
    assert set(declared) == found


def test_every_file_is_in_under_its_own_name(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        f"{package}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert inside == wanted
    assert {name.split("/")[0] for name in inside} == set(PACKAGES.values())


def test_the_licence_is_in(wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow  # an environment of its own
def test_help_from_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert "Usage: ferrum-mlx" in run(installed / "ferrum-mlx", "--help", cwd=tmp_path)


@pytest.mark.slow  # an environment of its own
def test_imports_come_from_the_environment(installed: Path, tmp_path: Path) -> None:
    for package in PACKAGES.values():
        file = run(installed / "python", "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path)
        assert Path(file.strip()).is_relative_to(installed.parent)


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")  # so that the model is in the shared cache
def test_one_generation_from_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "ferrum-mlx", "run", "--offline", "--max-tokens", "8", "Hello", cwd=tmp_path)
    assert answer.strip()
    assert "\x1b" not in answer
