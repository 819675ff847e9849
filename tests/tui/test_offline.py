"""The screen and its engine's process on a machine without a network, with a model that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrum_mlx.catalog import ResolvedModel

from ..unit.blocked_sockets import block_sockets
from .glass import Glass

OPTIONS = ["--temperature", "0", "--max-tokens", "8"]  # not --offline: nothing may need it


@pytest.mark.parametrize("backend", ["mlx", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_chat_with_sockets_blocked(
    backend: str, smollm2: ResolvedModel, empty_hub_cache: None, tmp_path: Path
) -> None:
    pytest.importorskip(backend)
    blocked = block_sockets(tmp_path)
    home = {"HOME": str(tmp_path / "home"), "FERRUM_CACHE": str(smollm2.path.parents[2])}
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    with Glass([*OPTIONS, "--backend", backend], {**home, **threads, **blocked.env}) as glass:
        glass.see("○ ready", "Ask something")
        glass.send("What is the capital of France?\r")
        glass.see("Paris", "tok/s")
        glass.send("\x0f")  # Ctrl+O: the models, those to download too
        glass.see("qwen3-0.6b", "98.4 MB")
        glass.send("\x1b")
        glass.until(lambda: "qwen3-0.6b" not in glass.shown, "the chat again")
        glass.send("\x04")
        assert glass.end() == 0
    assert blocked.tried == ""
    for process in ("'-m', 'ferrum_mlx', 'chat'", "from ferrum_mlx.transport import child"):
        assert any(process in line for line in blocked.watched)


def test_a_call_would_have_been_seen(tmp_path: Path) -> None:
    blocked = block_sockets(tmp_path)
    program = "import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **blocked.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no network here" in done.stderr
    assert program in blocked.tried.replace('\\"', '"')
