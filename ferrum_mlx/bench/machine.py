"""What a benchmark ran on, without the machine's name."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ferrum_mlx.bench.ceiling import num_threads

_PACKAGES = ("mlx", "mlx-lm", "torch", "transformers", "numpy", "llama-cpp-python")


def facts(backend: str) -> dict[str, object]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": num_threads(backend),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def tool() -> str:
    return f"ferrum-mlx {_version('ferrum-mlx')}"


def peak_rss() -> int:
    """Bytes of this process's memory at their most, so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """As its maker calls it."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.SubprocessError):
        pass  # some kernels hide it
    return platform.processor() or "unknown"
