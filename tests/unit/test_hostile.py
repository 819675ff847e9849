"""Thousands of mutated model files: each is loaded, or refused in one line, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .hostile_cycles import CASES, LOADED
from .hostile_files import write_all

CHILD = Path(__file__).with_name("hostile_child.py")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "sound"
    write_all(folder)
    return folder


def attack(folder: Path, backend: str, *plan: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), str(folder), backend, "8", *plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# Per kind, so many that both outcomes are seen; over 2,000 in all.
PLANS = {
    "mlx": (
        "gguf=900",
        "safetensors=350",
        "config=350",
        "index=150",
        "tokenizer=300",
        "tokenizer_config=100",
        "spm=300",
        "types=500",
        "spm_types=500",
        "peft_config=250",
        "peft=250",
        "mlx_lm_config=250",
        "mlx_lm=250",
    ),
    "torch": ("gguf=60", "safetensors=60", "config=100", "spm_types=200"),
}


@pytest.mark.parametrize("backend", PLANS)
@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_files(backend: str, share: int, sound: Path) -> None:
    """All of them with the slow tests, and always a fifth."""
    pytest.importorskip(backend)
    plan = [f"{kind}={int(count) // share}" for kind, count in (part.split("=") for part in PLANS[backend])]
    report = attack(sound, backend, *plan)
    assert report["faults"] == []
    assert report["grown"] < 300 << 20
    for part in plan:
        kind, _, count = part.partition("=")
        assert sum(report[kind].values()) == int(count)
        assert min(report[kind].values()) > 0, report


def test_a_reader_without_guards_is_found_out(sound: Path) -> None:
    faults = attack(sound, "mlx", "unguarded=60")["faults"]
    assert any("MemoryError" in fault or "OverflowError" in fault for fault in faults)
    assert any("error: " in fault for fault in faults)  # struct's: past the end


def test_what_leads_back_to_itself(sound: Path) -> None:
    found = attack(sound, "mlx", "cycles")["cycles"]
    assert found == {name: "loaded" if name in LOADED else "refused" for name in CASES}
