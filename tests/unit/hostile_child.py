"""Loads mutated files, in a process with little memory, and prints what became of them.

    python hostile_child.py FOLDER BACKEND SEED KIND=COUNT ...

FOLDER holds sound files: `model.gguf` and a checkpoint folder `hf`. Each file that is neither loaded nor
refused by a FerrumError, and each that took too much time or memory, is named.
"""

from __future__ import annotations

import faulthandler
import json
import random
import re
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import FerrumError

ROOM = 1 << 30  # bytes that all loading together may take
SLOW_S = 10.0
HANGS_S = 30.0
OUT_OF_MEMORY = re.compile("MemoryError|bad_alloc|[Cc]annot allocate|out of memory|not enough memory")
NASTY: list[Any] = [
    *(0, -1, 1, 7, 10**6, 2**31 - 1, 2**31, 10**12, 2**63, 2**64 - 1, 10**40, 1e308, float("nan"), -1e9),
    *("", "x", "x" * 100_000, "../../../etc/passwd", "/dev/zero", "a\0b", None, True, [], {}, [[]], [10**12]),
]
HUGE = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, most of them near the beginning."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(len(data), rng.choice((64, 4096, len(data)))))
        changed[at] = rng.choice((0, 0xFF, changed[at] ^ (1 << rng.randrange(8)), rng.randrange(256)))
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(min(len(data), rng.choice((64, 4096, len(data)))))]


def huge(data: bytes, rng: random.Random) -> bytes:
    """A length, count or offset that is absurd."""
    at = rng.randrange(max(1, min(len(data), 6000) - 8))
    fmt = rng.choice(["<Q", "<I"])
    number = rng.choice(HUGE) % 2 ** (8 * struct.calcsize(fmt))
    return data[:at] + struct.pack(fmt, number) + data[at + struct.calcsize(fmt) :]


def repeated(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start : start + rng.randrange(1, 200)] * rng.randint(2, 50) + data[start:]


BYTES = (flipped, flipped, cut, huge, huge, repeated)


def nasty(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place in it changed."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in list(items)[:200]:
            places.append((node, key))
            walk(child)

    walk(value)
    if not places:
        return deepcopy(rng.choice(NASTY))
    node, key = rng.choice(places)
    what = rng.randrange(8)
    if what == 0 and isinstance(node, dict):
        del node[key]
    elif what == 1 and isinstance(node, dict):
        name = rng.choice(("auto_map", "x" * 1000, "", key + "_", "quantization", "text_config"))
        node[name] = deepcopy(node[key])
    else:
        node[key] = deepcopy(rng.choice(NASTY))
    return value


def json_text(data: bytes, rng: random.Random) -> bytes:
    what = rng.randrange(10)
    if what == 0:
        return b"[" * 200_000
    if what == 1:
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    if what == 2:
        return rng.choice(BYTES)(data, rng)
    value = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        value = nasty(value, rng)
    return json.dumps(value).encode()


def safetensors(data: bytes, rng: random.Random) -> bytes:
    if rng.randrange(2):
        return rng.choice(BYTES)(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header = json_text(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def load_folder(folder: Path, backend: str) -> None:
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    load_tokenizer(resolved).encode("hello <eos>")
    load_weights(resolved, backend)


def load_gguf(path: Path, backend: str) -> None:
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = ResolvedModel(name="m", path=path, format="gguf")
    load_tokenizer(resolved).encode("hello <eos>")
    load_weights(resolved, backend)


def load_weights(resolved: ResolvedModel, backend: str) -> None:
    if backend == "mlx":
        import mlx.core as mx

        from ferrum_mlx.backends.mlx.loader import load_model

        mx.eval(load_model(resolved, quantized=True)[0].parameters())
    else:
        from ferrum_mlx.backends.torch import device, loader

        loader.load_model(resolved, device.select("cpu"))


def unguarded(path: Path, backend: str) -> None:
    """A reader that believes its file: what this program must find out."""
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data, 24)[0]
    key = bytes(length)
    struct.unpack_from("<I", data, 32 + len(key))


# kind -> the file that is changed, how, and what loads it
KINDS: dict[str, tuple[str, Callable[[bytes, random.Random], bytes], Callable[[Path, str], None]]] = {
    "gguf": ("model.gguf", lambda data, rng: rng.choice(BYTES)(data, rng), load_gguf),
    "safetensors": ("hf/model-1.safetensors", safetensors, load_folder),
    "config": ("hf/config.json", json_text, load_folder),
    "index": ("hf/model.safetensors.index.json", json_text, load_folder),
    "tokenizer": ("hf/tokenizer.json", json_text, load_folder),
    "tokenizer_config": ("hf/tokenizer_config.json", json_text, load_folder),
    "unguarded": ("model.gguf", lambda data, rng: rng.choice(BYTES)(data, rng), unguarded),
}


def attempt(kind: str, number: int, folder: Path, backend: str, seed: int) -> str:
    """ "loaded" or "refused"; anything else is a fault."""
    name, mutate, load = KINDS[kind]
    path = folder / name
    sound = path.read_bytes()
    path.unlink()  # not written over: a mapping of it may be alive
    path.write_bytes(mutate(sound, random.Random(f"{seed} {kind} {number}")))
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    start = time.process_time()
    try:
        load(path if path.suffix == ".gguf" else path.parent, backend)
        outcome = "loaded"
    except FerrumError as error:
        text = str(error)
        outcome = "refused" if "\n" not in text and len(text) < 4000 else f"a long message: {text[:200]!r}"
        if OUT_OF_MEMORY.search(text):
            outcome = f"memory: {text[:300]}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:300]}"
    faulthandler.cancel_dump_traceback_later()
    if time.process_time() - start > SLOW_S:
        outcome = f"slow: {time.process_time() - start:.1f} s"
    path.unlink()
    path.write_bytes(sound)
    return outcome


def main() -> None:
    source, backend, seed, *plan = sys.argv[1:]
    folder = Path(source).with_name(f"mutated-{backend}-{seed}-{plan[0]}")
    shutil.copytree(source, folder)
    load_gguf(folder / "model.gguf", backend)  # sound files are loaded, and all that is imported is
    load_folder(folder / "hf", backend)
    me = psutil.Process()
    limit = me.memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report: dict[str, Any] = {"faults": []}
    for kind, count in (part.split("=") for part in plan):
        counts = {"loaded": 0, "refused": 0}
        for number in range(int(count)):
            outcome = attempt(kind, number, folder, backend, int(seed))
            if outcome in counts:
                counts[outcome] += 1
            else:
                report["faults"].append(f"{kind} {number}: {outcome}")
        report[kind] = counts
    unit = 1 if sys.platform == "darwin" else 1024
    report["grown"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    print(json.dumps(report))


if __name__ == "__main__":
    main()
