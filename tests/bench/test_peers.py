"""Peers by name; a server of OpenAI's completions; llama.cpp as a package and as a server of its own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ferrum_mlx import hub
from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.bench import peers, peers_llama, workloads
from ferrum_mlx.bench.peers_url import Remote
from ferrum_mlx.bench.systems import PeerAbsentError
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import FerrumError, UsageError

from .bench_systems import slow_subject

ONE, TWO = workloads.decode(4, 0, 1, 512), workloads.decode(4, 0, 2, 512)


class Completions:
    """A server; what it was asked is in `asked`.

    Attributes:
        takes_ids: False answers 400 to prompts that are no text.
        ends_early: tokens that it leaves out.
        chunk: tokens a chunk.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.takes_ids, self.ends_early, self.chunk = True, 0, 1
        completions = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if isinstance(body["prompt"], list) and not completions.takes_ids:
                    self._send(400, b"{}")
                    return
                completions.asked.append(body)
                self._send(200, completions.answer(body))

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, body: dict[str, Any]) -> bytes:
        count = body["max_tokens"] - self.ends_early
        chunks = [{"choices": [{"text": "a"}]} for _ in range(0, count, self.chunk)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        details = {"prompt_tokens_details": {"cached_tokens": 3}}
        events = [*chunks, {"choices": [], "usage": usage | details}]
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Completions]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Completions()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def remote(completions: Completions) -> Remote:
    found = Remote("a server", completions.url, FakeCodec())
    found.find_model()
    return found


def test_a_server_gets_ids_and_as_many_tokens_as_everyone(completions: Completions) -> None:
    run = remote(completions).run(ONE, [Arrival("one", [70, 71], 5)])
    (asked,) = completions.asked
    assert (asked["model"], asked["prompt"], asked["max_tokens"]) == ("tiny", [70, 71], 5)
    assert (asked["temperature"], asked["ignore_eos"], asked["stream"]) == (0, True, True)
    (stream,) = run.streams
    assert len(stream.times) == 5
    assert stream.arrived <= stream.times[0] <= stream.times[-1]
    assert (stream.ids, stream.cached_tokens, stream.ended) == ([], 3, True)


def test_text_for_a_server_that_takes_no_ids(completions: Completions) -> None:
    completions.takes_ids = False
    peer = remote(completions)
    run = peer.run(ONE, [Arrival("one", list(b"Hello"), 2)])
    assert completions.asked[0]["prompt"] == "Hello"
    assert peer.method(ONE) == "HTTP, prompts as text"
    assert len(run.streams[0].prompt) == 5  # by the server's own count


def test_tokens_of_a_chunk_share_its_moment(completions: Completions) -> None:
    completions.chunk = 3
    run = remote(completions).run(ONE, [Arrival("one", [70], 6)])
    times = run.streams[0].times
    assert (len(times), len(set(times))) == (6, 2)


def test_a_server_that_says_less_is_not_measured(completions: Completions) -> None:
    completions.ends_early = 2
    with pytest.raises(FerrumError, match="3 tokens came instead of 5"):
        remote(completions).run(ONE, [Arrival("one", [70], 5)])


def test_several_requests_and_one_that_comes_later(completions: Completions) -> None:
    case = Case("load", "load", 2, 100)
    arrivals = [Arrival("one", [70], 3), Arrival("two", [71], 3, after=2)]
    run = remote(completions).run(case, arrivals)
    assert [len(stream.times) for stream in run.streams] == [3, 3]
    assert run.streams[1].arrived >= run.streams[0].times[1]


def test_a_server_that_is_gone_fails(completions: Completions) -> None:
    peer = remote(completions)
    completions.server.shutdown()
    completions.server.server_close()
    with pytest.raises(FerrumError, match="the server failed: URLError"):
        peer.run(ONE, [Arrival("one", [70], 5)])


def setting(monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel | None = None) -> peers.Setting:
    """With a model where one is given."""
    subject = slow_subject(monkeypatch)
    if resolved is not None:
        monkeypatch.setattr(peers.Setting, "backend", "mlx")
        monkeypatch.setattr(hub, "resolve", lambda *args, **settings: resolved)
    return peers.Setting(subject, subject.config, [ONE, TWO])


def gguf(folder: Path, kind: str = "gguf") -> ResolvedModel:
    return ResolvedModel(name="m", path=folder / "m.gguf", format=kind, card=None, revision="", source="")


def test_unknown_names_are_refused() -> None:
    peers.check_names(["mlx-lm", "https://host/v1"])
    with pytest.raises(UsageError, match="--vs 'vllm'; allowed: mlx-lm, "):
        peers.check_names(["mlx-lm", "vllm"])


def test_who_is_here_and_who_is_absent(monkeypatch: pytest.MonkeyPatch, completions: Completions) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)

    def broken(setting: peers.Setting) -> Any:
        raise ImportError("libfoo.so\n is missing")

    monkeypatch.setitem(peers.PEERS, "llama.cpp", broken)
    absent = {
        "mlx-lm": "the package mlx-lm is not installed; pip install",
        "transformers": "the package torch is not installed; pip install",
        "llama.cpp": "it cannot be set up: ImportError: libfoo.so is missing",
        "http://127.0.0.1:9": "no server answers at http://127.0.0.1:9/v1/models",
    }
    wanted = setting(monkeypatch)
    assert peers.find(completions.url, wanted).name == completions.url
    for name, why in absent.items():
        with pytest.raises(PeerAbsentError, match=why):
            peers.find(name, wanted)


class FakeLlama:
    """llama-cpp-python's Llama as far as it is used: it would keep what prompts have in common."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.fresh = False

    def reset(self) -> None:
        self.fresh = True

    def generate(self, tokens: list[int], temp: float) -> Iterator[int]:
        assert (self.fresh, temp) == (True, 0)
        self.fresh = False
        while True:
            yield len(tokens)

    def close(self) -> None:
        self.closed = True


def test_the_package_runs_one_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = ModuleType("llama_cpp")
    module.Llama = FakeLlama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(peers_llama, "find_spec", lambda name: module)
    monkeypatch.setattr(peers_llama.shutil, "which", lambda name: None)
    peer = peers_llama.llama_peer(setting(monkeypatch, gguf(tmp_path)))
    assert isinstance(peer, peers_llama.LlamaPython)
    settings = peer._llama.settings
    assert settings["model_path"] == str(tmp_path / "m.gguf")
    assert settings["n_ctx"] >= TWO.longest
    assert (peer.method(ONE), peer.refusal(ONE)) == ("llama-cpp-python", "")
    assert "llama-server" in peer.refusal(TWO)
    for _ in range(2):
        run = peer.run(ONE, [Arrival("one", [70, 71], 3)])
        assert (run.streams[0].ids, len(run.streams[0].times)) == ([2, 2, 2], 3)
    peer.close()


def test_llama_cpp_needs_a_program_and_a_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers_llama.shutil, "which", lambda name: None)
    monkeypatch.setattr(peers_llama, "find_spec", lambda name: None)
    with pytest.raises(PeerAbsentError, match="neither a llama-server on the PATH nor"):
        peers_llama.llama_peer(setting(monkeypatch))
    monkeypatch.setattr(peers_llama.shutil, "which", lambda name: "/bin/llama-server")
    with pytest.raises(PeerAbsentError, match="fake backend has no weights"):
        peers_llama.llama_peer(setting(monkeypatch))
    with pytest.raises(PeerAbsentError, match="GGUF files alone"):
        peers_llama.llama_peer(setting(monkeypatch, gguf(tmp_path, "safetensors")))


SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": json.dumps(options)}}]}}).encode())
    def log_message(self, *args):
        pass
HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


def test_a_server_of_our_own_is_started_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(SERVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    peer = peers_llama.llama_peer(setting(monkeypatch, gguf(tmp_path)))
    assert isinstance(peer, peers_llama.LlamaServer)
    options = json.loads(peer._model)
    assert options["--model"] == str(tmp_path / "m.gguf")
    assert int(options["--parallel"]) == 3  # the two streams, and one that may come in
    assert int(options["--ctx-size"]) == 3 * TWO.longest
    process = peer._process
    assert process.poll() is None
    peer.close()
    assert process.poll() is not None


def test_a_server_that_does_not_start_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerAbsentError, match="did not start"):
        peers_llama.llama_peer(setting(monkeypatch, gguf(tmp_path)))
