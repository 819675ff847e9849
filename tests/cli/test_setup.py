"""`.ci/setup` on machines that lack something, and after an interrupted run; system tools are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "head", "tail", "rm", "mkdir", "ln", "dirname")

# A Python whose venv holds a link to itself; its pip fails where a file no-network lies.
PYTHON = """#!/bin/sh
case "$*" in
  -V) echo "Python 3.{minor}.0" ;;
  "-m venv"*) {venv} ;;
  "-m pip"*) echo "pip says so" >&2; echo "$*" >>"$CALLS"; [ ! -e no-network ] ;;
  -c*) echo "{probe}" ;;
esac
"""
MAKES_VENV = 'mkdir -p "$3/bin"; ln -s "$0" "$3/bin/python"'


class Machine:
    """A PATH of stand-ins, a checkout, and a log of pip's calls."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.checkout, self.calls = folder / "bin", folder / "check out", folder / "calls"
        self.bin.mkdir()
        (self.checkout / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci/setup", self.checkout / ".ci/setup")
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)
        self.tool("uname", 'case "$1" in -s) echo Linux ;; -m) echo x86_64 ;; esac')
        self.tool("getconf", "echo glibc 2.35")

    def tool(self, name: str, body: str) -> None:
        file = self.bin / name
        file.unlink(missing_ok=True)  # it may be a link to the real one
        file.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def python(self, name: str = "python3", minor: int = 11, probe: str = "", venv: str = MAKES_VENV) -> None:
        self.tool(name, PYTHON.format(minor=minor, probe=probe, venv=venv))

    def setup(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "CALLS": str(self.calls)}
        return subprocess.run(
            ["/bin/sh", ".ci/setup", *args], cwd=self.checkout, env=env, capture_output=True, text=True
        )

    def refused(self) -> str:
        """The one line of a refusal."""
        done = self.setup()
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1, done.stderr
        assert not (self.checkout / ".venv").exists()
        return done.stderr

    def installs(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_sets_up_once(machine: Machine) -> None:
    machine.python()
    first, second = machine.setup(), machine.setup()
    assert (first.returncode, first.stdout, first.stderr.count("\n")) == (0, "", 2)
    assert "pip says so" not in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert machine.installs() == 1


def test_a_test_set_up_serves_chat_but_not_the_other_way_round(machine: Machine) -> None:
    machine.python()
    machine.setup()
    machine.setup("test")
    assert "-e .[test]" in machine.calls.read_text().splitlines()[1]
    machine.setup()
    machine.setup("test")
    assert machine.installs() == 2


def test_a_changed_pyproject_is_installed_into_the_same_venv(machine: Machine) -> None:
    machine.python()
    machine.setup()
    kept = machine.checkout / ".venv/kept"
    kept.touch()
    (machine.checkout / "pyproject.toml").write_text("[project]\nversion = '2'\n")
    assert machine.setup().returncode == 0
    assert kept.exists()
    assert machine.installs() == 2


@pytest.mark.parametrize("left", ["empty folder", "no stamp", "dangling python"])
def test_an_interrupted_set_up_is_made_anew(machine: Machine, left: str) -> None:
    machine.python()
    venv = machine.checkout / ".venv"
    if left == "empty folder":
        venv.mkdir()
    else:
        machine.setup()
        (venv / "finished").unlink() if left == "no stamp" else (venv / "bin/python").unlink()
        (venv / "half-made").touch()
    done = machine.setup()
    assert done.returncode == 0
    assert "making it anew" in done.stderr
    assert not (venv / "half-made").exists()
    assert machine.setup().stderr == ""


def test_a_moved_checkout_is_set_up_anew(machine: Machine) -> None:
    machine.python()
    machine.setup()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    assert "making it anew" in machine.setup().stderr


def test_a_failed_install_shows_pip_and_the_next_run_recovers(machine: Machine) -> None:
    machine.python()
    (machine.checkout / "no-network").touch()
    failed = machine.setup()
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "pip says so" in failed.stderr
    assert "installing failed" in failed.stderr.splitlines()[-1]
    (machine.checkout / "no-network").unlink()
    assert machine.setup().returncode == 0


def test_no_python(machine: Machine) -> None:
    assert "Python 3.11 or newer is needed (there is no python3)" in machine.refused()


def test_only_old_pythons_are_named(machine: Machine) -> None:
    machine.python(minor=9, probe="3.9")
    assert "(python3 is 3.9)" in machine.refused()


def test_a_newer_python_of_another_name_is_found(machine: Machine) -> None:
    machine.python(minor=9, probe="3.9")
    machine.tool("python3.15", "exit 127")  # a shim of a version that is not installed
    machine.python("python3.13", minor=13)
    assert "with Python 3.13.0" in machine.setup().stderr


def test_a_python_without_venv(machine: Machine) -> None:
    machine.python(probe="3.11 without venv")
    machine.tool("apt-get", "")
    assert "next: apt install python3-venv" in machine.refused()


def test_a_venv_that_fails(machine: Machine) -> None:
    machine.python(venv="echo ensurepip is not available; exit 1")
    machine.tool("apt-get", "")
    done = machine.setup()
    assert done.returncode == 1
    assert "ensurepip is not available" in done.stderr
    assert "apt install python3-venv" in done.stderr.splitlines()[-1]
    machine.python()
    assert machine.setup().returncode == 0


@pytest.mark.parametrize("libc", ["echo glibc 2.34", "echo glibc 2.31", "exit 1"])
def test_a_glibc_below_the_floor(machine: Machine, libc: str) -> None:
    machine.python()
    machine.tool("getconf", libc)
    assert "glibc 2.35 or newer" in machine.refused()


@pytest.mark.parametrize("libc", ["echo glibc 2.35", "echo glibc 2.42", "echo glibc 2.36.9000"])
def test_a_glibc_at_or_over_the_floor(machine: Machine, libc: str) -> None:
    machine.python()
    machine.tool("getconf", libc)
    assert machine.setup().returncode == 0


@pytest.mark.parametrize(
    ("system", "arch", "macos", "says"),
    [
        ("Darwin", "x86_64", "15.1", "Intel"),
        ("Darwin", "arm64", "13.6", "macOS 14 or newer"),
        ("Linux", "riscv64", "", "Linux on riscv64 is not supported"),
        ("FreeBSD", "amd64", "", "FreeBSD on amd64 is not supported"),
    ],
)
def test_platforms_without_a_wheel(machine: Machine, system: str, arch: str, macos: str, says: str) -> None:
    machine.python()
    machine.tool("uname", f'case "$1" in -s) echo {system} ;; -m) echo {arch} ;; esac')
    machine.tool("sw_vers", f"echo {macos}")
    assert says in machine.refused()


@pytest.mark.parametrize("macos", ["14.0", "15.1", "26.0"])
def test_macos_on_apple_silicon(machine: Machine, macos: str) -> None:
    machine.python()
    machine.tool("uname", 'case "$1" in -s) echo Darwin ;; -m) echo arm64 ;; esac')
    machine.tool("sw_vers", f"echo {macos}")
    assert machine.setup().returncode == 0


def test_a_folder_that_cannot_be_written(machine: Machine) -> None:
    machine.python()
    machine.tool("mkdir", "exit 1")  # permissions do not stop root
    assert "check out/.venv cannot be written; next: check the folder's permissions" in machine.refused()
