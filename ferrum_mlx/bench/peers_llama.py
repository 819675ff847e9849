"""llama.cpp beside this engine: a `llama-server` on the PATH, else the package llama-cpp-python.

Both read the same GGUF file that we do. llama.cpp quantizes activations, so its tokens part from ours after
a while; token counts are the same.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ferrum_mlx.bench.ceiling import num_threads
from ferrum_mlx.bench.peers_url import Remote
from ferrum_mlx.bench.systems import PeerAbsentError, System
from ferrum_mlx.bench.trace import Trace
from ferrum_mlx.bench.workloads import Arrival, Arriving, Case

if TYPE_CHECKING:
    from ferrum_mlx.bench.peers import Setting

NAME = "llama.cpp"
_PATIENCE = 120.0  # seconds that a server has to load the model


class LlamaPython:
    """llama-cpp-python; `llama` is its Llama."""

    name, same_weights = NAME, False

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def method(self, case: Case) -> str:
        return "llama-cpp-python"

    def refusal(self, case: Case) -> str:
        if case.kind == "pp" and case.depth:
            return "it starts every prompt from nothing here"
        if case.streams > 1:
            return "llama-cpp-python runs one stream; for several put llama-server on the PATH"
        return ""

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        run, arriving = Trace(), Arriving(arrivals)
        while due := arriving.due(run, perf_counter()):
            for arrival, stream in due:
                self._llama.reset()  # it would keep what the last prompt had in common with this one
                for token in self._llama.generate(stream.prompt, temp=0.0):
                    stream.add(perf_counter(), [int(token)])
                    if len(stream.ids) == arrival.max_tokens:
                        break
                stream.ended = True
        return run

    def close(self) -> None:
        self._llama.close()


class LlamaServer(Remote):
    """A llama-server that this process started, and ends."""

    def __init__(self, command: Sequence[str], url: str, setting: Setting) -> None:
        super().__init__(NAME, url, setting.subject.codec)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self.wait(_PATIENCE, lambda: self._process.poll() is None)
        except BaseException:
            self.close()
            raise

    def method(self, case: Case) -> str:
        return "llama-server"

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


def llama_peer(setting: Setting) -> System:
    server = shutil.which("llama-server")
    if server is None and find_spec("llama_cpp") is None:
        raise PeerAbsentError(
            "neither a llama-server on the PATH nor the package llama-cpp-python",
            next_step="pip install llama-cpp-python",
        )
    resolved = setting.resolved()
    if resolved.format != "gguf":
        raise PeerAbsentError("it reads GGUF files alone, and this model is none")
    threads = num_threads(setting.backend)
    if server is None:
        llama = import_module("llama_cpp").Llama(
            model_path=os.fspath(resolved.path),
            n_ctx=setting.longest,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        return LlamaPython(llama)
    port = _free_port()
    command = _command(server, resolved.path, port, threads, setting.streams, setting.longest)
    return LlamaServer(command, f"http://127.0.0.1:{port}", setting)


def _command(server: str, model: Path, port: int, threads: int, streams: int, longest: int) -> list[str]:
    options = {
        "--model": os.fspath(model),
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": threads,
        "--threads-batch": threads,
        "--parallel": streams,
        "--ctx-size": streams * longest,  # shared out evenly
    }
    return [server, *(str(part) for option in options.items() for part in option)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
