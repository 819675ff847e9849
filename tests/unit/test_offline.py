"""A warm start makes no network call: not to find the model, not to load it, not to answer."""

from __future__ import annotations

import subprocess
import sys

from ferrum_mlx.catalog import ResolvedModel

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
