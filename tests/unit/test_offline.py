"""A warm start makes no network call: not to find the model, not to load it, not to answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrum_mlx.catalog import ResolvedModel

from .blocked_sockets import block_sockets

PROGRAM = """
import sys
calls = []
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        calls.append((event, args[1:]))
sys.addaudithook(watch)
if sys.argv[1] == "control":
    import socket
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        pass
else:
    from ferrum_mlx import LLM, SamplingParams
    with LLM() as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))
        assert len(output.token_ids) == 4, output
print(len(calls))
"""


def calls(what: str) -> int:
    command = [sys.executable, "-c", PROGRAM, what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def test_warm_start_to_answer_without_a_network_call(smollm2: ResolvedModel) -> None:
    assert calls("llm") == 0


def test_the_watch_sees_a_call() -> None:
    assert calls("control") > 0


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (("models", "list"), ""),
        (("models", "info"), ""),
        (("run", "--max-tokens", "4", "Hi"), ""),
        (("chat", "--plain", "--offline", "--max-tokens", "4"), "Hi\n"),
        (("models", "pull", "tiny/model"), ""),  # the control
    ],
)
def test_commands_with_sockets_blocked(
    args: tuple[str, ...], stdin: str, smollm2: ResolvedModel, empty_hub_cache: None, tmp_path: Path
) -> None:
    blocked = block_sockets(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ferrum_mlx", *args],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **blocked.env},
    )
    if "pull" in args:
        assert done.returncode == 1
        assert "did not deliver tiny/model" in done.stderr
        assert "socket" in blocked.tried
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert blocked.tried == ""
