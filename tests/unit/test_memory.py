"""What a machine has left, with made-up cgroups and system programs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ferrum_mlx import memory

GB = 1 << 30
TOTAL, FREE = 64 * GB, 40 * GB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 GiB, 40 of them free, no cgroup."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=FREE))
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")


def limited(folder: Path, names: tuple[str, str, str], limit: object, used: int = 0, idle: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {idle}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_limits_the_system_decides() -> None:
    assert (memory.available(), memory.total(), memory.limits()) == (FREE, TOTAL, {})


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [("0::/app", "", V2), ("4:memory:/app", "memory", V1), ("4:cpu,memory:/app", "memory", V1)],
)
def test_a_cgroups_limit_less_what_it_uses_and_cannot_give_back(
    line: str, top: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(f"1:cpu:/\n{line}\n")
    folder = tmp_path / "cgroup" / top / "app"
    limited(folder, names, 8 * GB, used=3 * GB, idle=GB)
    assert (memory.available(), memory.total()) == (6 * GB, 8 * GB)
    assert memory.limits() == {str(folder / names[0]): 8 * GB}
    limited(folder, names, 8 * GB, used=9 * GB)
    assert memory.available() == 0


def test_the_tightest_of_a_cgroup_and_those_above_it_counts(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/a/b")
    limited(tmp_path / "cgroup/a/b", V2, "max")
    limited(tmp_path / "cgroup/a", V2, 4 * GB, used=GB)
    limited(tmp_path / "cgroup", V2, 9 * GB, used=GB)
    limited(tmp_path, V2, GB)  # outside of the tree
    assert (memory.available(), memory.total()) == (3 * GB, 4 * GB)


def test_in_a_container_the_path_may_begin_above_what_is_visible(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/kubepods/pod1/abc")
    limited(tmp_path / "cgroup", V2, 2 * GB)
    assert memory.total() == 2 * GB


@pytest.mark.parametrize("limit", ["max", (1 << 63) - 4096, "", "nonsense", "-1"])
def test_no_limit(limit: object, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n4:memory:/\n")
    limited(tmp_path / "cgroup", V2, limit)
    limited(tmp_path / "cgroup/memory", V1, limit)
    assert memory.available() == FREE


def test_files_that_cannot_be_read_are_no_limit(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"\xff\xfe")
    assert memory.available() == FREE
    (tmp_path / "own").write_text("0::/app")
    (tmp_path / "cgroup/app/memory.max").mkdir(parents=True)
    assert memory.available() == FREE


@pytest.mark.parametrize(
    ("said", "installed", "limit"),
    [
        ("0", 24 * GB, 16 * GB),
        ("0", 64 * GB, 48 * GB),
        ("20480", 24 * GB, 20 * GB),
        ("", 24 * GB, 16 * GB),
    ],
)
def test_metals_limit(said: str, installed: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=installed, available=0))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=said))
    assert memory.metal_limit() == limit
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert memory.metal_limit() is None


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the driver's tool")
@pytest.mark.parametrize(
    ("script", "free"), [("echo 143771", 143771 << 20), ("echo N/A", None), ("exit 9", None)]
)
def test_free_memory_of_a_gpu(
    script: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    memory.cuda_free.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory.cuda_free() == free
    memory.cuda_free.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert memory.cuda_free() is None
    memory.cuda_free.cache_clear()
