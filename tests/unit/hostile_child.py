"""Loads mutated files, in a process with little memory, and prints what became of them.

    python hostile_child.py FOLDER BACKEND SEED KIND=COUNT ...

FOLDER holds sound files, by hostile_files.py. Each file that is neither loaded nor refused by a FerrumError,
and each that took too much time or memory, is named. Of KIND "cycles" every case is tried once.
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
from hostile_cycles import CASES, Case  # a file beside this program

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


def any_bytes(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(BYTES)(data, rng)


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


def _typed(kind: int, fmt: str, value: float) -> bytes:
    return struct.pack(f"<I{fmt}", kind, value)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


ODD = [  # values of a GGUF's metadata, each behind its type
    *(_typed(0, "B", 255), _typed(1, "b", -1), _typed(7, "B", 1), _typed(7, "B", 0)),
    *(_typed(4, "I", 0), _typed(4, "I", 2**32 - 1), _typed(5, "i", -1), _typed(5, "i", 7)),
    *(_typed(10, "Q", 2**64 - 1), _typed(11, "q", -(2**63)), _typed(12, "d", float("inf"))),
    *(_typed(6, "f", 0.5), _typed(6, "f", float("nan")), _typed(6, "f", 0.0)),
    *(struct.pack("<I", 8) + _text(text) for text in ("", "x", "../x", "{{ x", "a b:$A", "\0", "x" * 5000)),
    *(_array(4, 0, b""), _array(5, 2, struct.pack("<ii", -1, 3)), _array(7, 1, b"\1")),
    *(_array(6, 1, struct.pack("<f", float("nan"))), _array(0, 100_000, bytes(100_000))),
    *(_array(8, 0, b""), _array(8, 2, _text("x") + _text("y")), _array(8, 3, _text("") * 3)),
]
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _text_end(data: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _value_end(data: bytes, at: int) -> int:
    """Behind a type and its value."""
    (kind,) = struct.unpack_from("<I", data, at)
    if kind == 8:
        return _text_end(data, at + 4)
    if kind != 9:
        return at + 4 + WIDTHS[kind]
    element, count = struct.unpack_from("<IQ", data, at + 4)
    at += 16
    if element != 8:
        return at + count * WIDTHS[element]
    for _ in range(count):
        at = _text_end(data, at)
    return at


def retyped(data: bytes, rng: random.Random) -> bytes:
    """A sound GGUF with other values behind one or two of its keys, a third of them of the same type."""
    tensors, count = struct.unpack_from("<QQ", data, 8)
    at, pairs = 24, []
    for _ in range(count):
        key_end = _text_end(data, at)
        end = _value_end(data, key_end)
        pairs.append((data[at:key_end], data[key_end:end]))
        at = end
    directory = at
    for _ in range(tensors):
        at = _text_end(data, at)
        at += 4 + 8 * int(struct.unpack_from("<I", data, at)[0]) + 12
    values = data[at + -at % 32 :]
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(count)
        key, value = pairs[place]
        others = rng.choice(([other for _, other in pairs], ODD, ODD, ODD))
        same = [other for other in (*others, value) if other[:4] == value[:4]]
        pairs[place] = (key, rng.choice(same if rng.randrange(3) == 0 else others))
    header = data[:24] + b"".join(key + value for key, value in pairs) + data[directory:at]
    return header + bytes(-len(header) % 32) + values


def load_folder(folder: Path, backend: str) -> None:
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    load_tokenizer(resolved).encode("hello <eos>")
    load_weights(resolved, backend)


def load_chat(folder: Path, backend: str) -> None:
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = ResolvedModel(name="m", path=folder, format="safetensors")
    load_tokenizer(resolved).encode_chat([{"role": "user", "content": "hello"}])
    load_weights(resolved, backend)


def load_gguf(path: Path, backend: str) -> None:
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = ResolvedModel(name="m", path=path, format="gguf")
    load_tokenizer(resolved).encode("hello <eos>")
    load_weights(resolved, backend)


def load_adapter(folder: Path, _: str) -> None:
    from ferrum_mlx.adapters import check_fits, read_adapter

    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    places = {f"model.layers.{layer}.self_attn.{name}": (64, 64) for layer in range(2) for name in names}
    places |= {f"model.layers.{layer}.mlp.up_proj": (64, 96) for layer in range(2)}
    wanted = {path: size for path, size in places.items() if path.endswith(("q_proj", "up_proj"))}
    check_fits(read_adapter("a", folder), wanted)


def load_weights(resolved: ResolvedModel, backend: str) -> None:
    from ferrum_mlx.fit import check_weights

    check_weights(resolved, "float32", 1 << 40)
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
    "gguf": ("model.gguf", any_bytes, load_gguf),
    "types": ("model.gguf", retyped, load_gguf),
    "spm": ("spm.gguf", any_bytes, load_gguf),
    "spm_types": ("spm.gguf", retyped, load_gguf),
    "peft_config": ("peft/adapter_config.json", json_text, load_adapter),
    "peft": ("peft/adapter_model.safetensors", safetensors, load_adapter),
    "mlx_lm_config": ("mlx_lm/adapter_config.json", json_text, load_adapter),
    "mlx_lm": ("mlx_lm/adapters.safetensors", safetensors, load_adapter),
    "safetensors": ("hf/model-1.safetensors", safetensors, load_folder),
    "config": ("hf/config.json", json_text, load_folder),
    "index": ("hf/model.safetensors.index.json", json_text, load_folder),
    "tokenizer": ("hf/tokenizer.json", json_text, load_folder),
    "tokenizer_config": ("hf/tokenizer_config.json", json_text, load_folder),
    "unguarded": ("model.gguf", any_bytes, unguarded),
}


def attempt(kind: str, number: int, folder: Path, backend: str, seed: int) -> str:
    """What became of one changed file."""
    name, mutate, load = KINDS[kind]
    path = folder / name
    sound = path.read_bytes()
    path.unlink()  # not written over: a mapping of it may be alive
    path.write_bytes(mutate(sound, random.Random(f"{seed} {kind} {number}")))
    outcome = outcome_of(load, path if path.suffix == ".gguf" else path.parent, backend)
    path.unlink()
    path.write_bytes(sound)
    return outcome


def attempt_cycle(change: Case, source: Path, folder: Path, backend: str) -> str:
    """What became of a copy of the sound files."""
    shutil.copytree(source, folder)
    part = change(folder)
    load = load_gguf if part.endswith(".gguf") else load_chat if part == "hf" else load_adapter
    outcome = outcome_of(load, folder / part, backend)
    shutil.rmtree(folder)
    return outcome


def outcome_of(load: Callable[[Path, str], None], path: Path, backend: str) -> str:
    """ "loaded" or "refused"; anything else is a fault."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    start = time.process_time()
    try:
        load(path, backend)
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
    return outcome


def main() -> None:
    source, backend, seed, *plan = sys.argv[1:]
    folder = Path(source).with_name(f"mutated-{backend}-{seed}-{plan[0]}")
    shutil.copytree(source, folder)
    load_gguf(folder / "model.gguf", backend)  # sound files are loaded, and all that is imported is
    load_gguf(folder / "spm.gguf", backend)
    load_folder(folder / "hf", backend)
    for adapter in ("peft", "mlx_lm"):
        load_adapter(folder / adapter, backend)
    me = psutil.Process()
    limit = me.memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report: dict[str, Any] = {"faults": []}
    if plan == ["cycles"]:
        plan, again = [], folder.with_name("again")
        report["cycles"] = {
            name: attempt_cycle(case, Path(source), again, backend) for name, case in CASES.items()
        }
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
