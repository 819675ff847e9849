"""What memory this machine has left, a container's limit included. No array library: every list may ask."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# (limit, usage, what of the usage the kernel gives back first) of cgroup v2 and v1
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SMALL_MAC = 36 << 30  # bytes; Metal recommends two thirds of memory up to here, three quarters above


def available() -> int:
    """Bytes that can be taken without swapping, by this process's cgroups too."""
    import psutil

    free: int = psutil.virtual_memory().available
    return max(0, min([free, *(limit - used for _, limit, used in _limited())]))


def total() -> int:
    """Bytes that this process may ever hold in memory."""
    import psutil

    installed: int = psutil.virtual_memory().total
    return min([installed, *(limit for _, limit, _ in _limited())])


def limits() -> dict[str, int]:
    """What the cgroups of this process are limited to, in bytes, by the limiting file."""
    return {str(folder): limit for folder, limit, _ in _limited()}


def metal_limit() -> int | None:
    """Bytes that Metal may keep wired, as far as the system says without Metal; None where there is none.

    At load Metal's own figure is taken, which this one only stands in for.
    """
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return None
    if megabytes := _said(["sysctl", "-n", "iogpu.wired_limit_mb"]):
        return megabytes << 20
    installed = total()
    return installed * 2 // 3 if installed <= _SMALL_MAC else installed * 3 // 4


@cache
def cuda_free() -> int | None:
    """Free bytes of the first NVIDIA GPU, as its driver's tool says; None where there is none. Asked once."""
    if not shutil.which("nvidia-smi"):
        return None
    megabytes = _said(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"])
    return None if megabytes is None else megabytes << 20


def _said(command: list[str]) -> int | None:
    """The whole number that a program of the system prints; None if it prints none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _limited() -> Iterator[tuple[Path, int, int]]:
    """(folder, limit, bytes used that cannot be given back) of every limited cgroup of this process."""
    for folder, (limit_file, used_file, idle) in _folders():
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None:
            continue
        reclaimable = _statistics(folder / "memory.stat").get(idle, 0)
        yield folder / limit_file, limit, max(0, (used or 0) - reclaimable)


def _folders() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The process's cgroups and all above them; in a container the path may begin above what is visible."""
    for line in _text(OWN_CGROUPS).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(top) and (each / names[0]).is_file():
                yield each, names


def _number(file: Path) -> int | None:
    """None for "max" and for v1's way of saying the same, a number beyond any memory."""
    text = _text(file)
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _statistics(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
