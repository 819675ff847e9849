"""The command as people run it: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Ferrum = Callable[..., subprocess.CompletedProcess[str]]
WAIT = 120.0  # seconds before a test gives up; never a measure of speed


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """What runs in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ferrum(tmp_path: Path) -> Ferrum:
    """Run `ferrum-mlx ARGS`, stdin empty unless given, in an empty folder."""

    def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ferrum_mlx", *args],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **env},
            timeout=WAIT,
        )

    return run


@pytest.fixture
def refused(ferrum: Ferrum) -> Callable[..., str]:
    """Run a command that must fail with one line and nothing on stdout; returns that line."""

    def run(*args: str, code: int, **more: str) -> str:
        done = ferrum(*args, **more)
        assert (done.returncode, done.stdout) == (code, "")
        lines = [line for line in done.stderr.splitlines() if line.startswith("ferrum-mlx: ")]
        assert len(lines) == 1, done.stderr
        assert "Traceback" not in done.stderr
        return lines[0]

    return run
