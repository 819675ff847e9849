"""`Kernel`, in the place of `mx.fast.metal_kernel` where there is no Metal.

MLX itself writes the source that it would give to Metal's compiler, signature and all; g++ compiles that
behind shim.h, and the kernel runs over copies of the arrays in host memory. What Metal would not tell is
found: reads and writes beside an array, outputs that nobody wrote (they stay NaN), results that depend on
which simdgroup is first.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from shutil import which
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

FOLDER = Path(__file__).parent
METAL = mx.metal.is_available()
FLAGS = ("-std=c++14", "-O1", "-Werror=double-promotion", "-Wno-attributes")  # Metal has no double
_SIDE = 4096  # bytes before and behind each array
_STORED = {mx.bfloat16: np.uint16, mx.float16: np.float16, mx.float32: np.float32, mx.int32: np.int32}
_built = tempfile.TemporaryDirectory(prefix="metal-shim-")  # gone when the process ends
_texts: dict[object, str] = {}
_libraries: dict[str, ctypes.CDLL] = {}


def _missing() -> str | None:
    """Why the kernels cannot run here at all."""
    if METAL or (sys.platform == "linux" and which("g++")):
        return None
    if sys.platform != "linux":
        return "no Metal here, and its stand-in for CPUs needs Linux"
    return "no g++ here, which compiles the Metal kernels for the CPU; install it to test them"


NEITHER = _missing()
needs_kernels = pytest.mark.skipif(NEITHER is not None, reason=str(NEITHER))
on_the_shim = pytest.mark.skipif(METAL, reason="there is Metal here: its own compiler is used")


class ShimError(Exception):
    """The kernel did what it must not."""


@dataclass
class Kernel:
    name: str
    input_names: list[str]
    output_names: list[str]
    source: str
    ensure_row_contiguous: bool = True
    orders: tuple[bool, ...] = (False, True)  # of simdgroups, True from the last on; results must be equal

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert all(whole % part == 0 for whole, part in zip(grid, threadgroup, strict=True))
        how = {"template": list(template), "grid": grid, "threadgroup": threadgroup}
        text = self._text(inputs, {**how, "output_shapes": output_shapes, "output_dtypes": output_dtypes})
        library = _library(text)
        given = {name: _host(array) for name, array in zip(self.input_names, inputs, strict=True)}
        shapes = {f"{name}_shape": np.array(a.shape, np.int32) for name, a in given.items()}
        found = [self._run(library, text, {**given, **shapes}, how, backwards, output_shapes, output_dtypes)
                 for backwards in self.orders]  # fmt: skip
        for name, one, other in zip(self.output_names, found[0], found[-1], strict=True):
            if one.tobytes() != other.tobytes():
                raise ShimError(f"{self.name}: {name} depends on which simdgroup is first")
        return [_device(array, dtype) for array, dtype in zip(found[0], output_dtypes, strict=True)]

    def _text(self, inputs: Sequence[mx.array], how: dict[str, Any]) -> str:
        """What MLX would hand to Metal's compiler."""
        kinds = [(array.dtype, array.size < 8, array.ndim == 0) for array in inputs]
        key = (self.source, repr(how["template"]), repr(kinds), repr(how["output_dtypes"]))
        if key not in _texts:
            kernel = mx.fast.metal_kernel(**{f: getattr(self, f) for f in Kernel.__match_args__[:5]})
            path = Path(_built.name) / "exported.mlxfn"
            mx.export_function(str(path), lambda *arrays: kernel(inputs=list(arrays), **how), *inputs)
            match = re.search(rb"template <.*?\ntemplate \[\[host_name.*?;\n", path.read_bytes(), re.DOTALL)
            assert match is not None
            _texts[key] = match[0].decode()
        return _texts[key]

    def _run(
        self,
        library: ctypes.CDLL,
        text: str,
        given: dict[str, np.ndarray],
        how: dict[str, Any],
        backwards: bool,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[np.ndarray]:
        outputs = dict(zip(self.output_names, zip(shapes, dtypes, strict=True), strict=True))
        memory, places = {}, []
        for name in _parameters(text):
            if name in outputs:
                shape, dtype = outputs[name]
                content = b"\xff" * (int(np.prod(shape)) * np.dtype(_STORED[dtype]).itemsize)
            else:
                content = given[name].tobytes()
            memory[name] = bytearray(b"\xff" * _SIDE + content + b"\xff" * _SIDE)
            places.append(ctypes.addressof(ctypes.c_char.from_buffer(memory[name])) + _SIDE)
        before = {name: bytes(array) for name, array in memory.items()}
        sizes = [(ctypes.c_uint * 3)(*how[name]) for name in ("grid", "threadgroup")]
        failure = library.launch((ctypes.c_void_p * len(places))(*places), *sizes, backwards)
        if failure:
            raise ShimError(f"{self.name}: {failure.decode()}")
        for name, array in memory.items():
            inside = slice(_SIDE, -_SIDE) if name in outputs else slice(0, 0)
            if array[: inside.start or None] != before[name][: inside.start or None]:
                raise ShimError(f"{self.name}: writes before {name}")
            if name in outputs and array[-_SIDE:] != before[name][-_SIDE:]:
                raise ShimError(f"{self.name}: writes behind {name}")
        return [
            np.frombuffer(bytes(memory[name][_SIDE:-_SIDE]), _STORED[dtype]).reshape(shape)
            for name, (shape, dtype) in outputs.items()
        ]


def any_kernel(**fields: Any) -> Any:
    """For tests of what calls the kernels: Metal's, or compiled for the CPU and run once."""
    return mx.fast.metal_kernel(**fields) if METAL else Kernel(**fields, orders=(False,))


def _host(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _device(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _parameters(text: str) -> list[str]:
    """Names of the kernel's buffers, in order."""
    found = re.findall(r"(\w+) \[\[buffer\((\d+)\)\]\]", text)
    assert [int(number) for _, number in found] == list(range(len(found)))
    assert len(found) <= 31, "Metal has no more buffers"
    return [name for name, _ in found]


def _library(text: str) -> ctypes.CDLL:
    if text not in _libraries:
        instance = re.search(r"decltype\((.*?>)\) ", text)
        assert instance is not None
        buffers = [f"shim::Arg{{arrays[{i}]}}" for i in range(len(_parameters(text)))]
        attributes = [f"attribute::{name}()" for name in re.findall(r"\[\[(\w+)\]\](?=[,)])", text)]
        source = (
            f'#include "shim.h"\n{text}\nstatic void** arrays;\n'
            f"static void call() {{ {instance[1]}({', '.join(buffers + attributes)}); }}\n"
            'extern "C" const char* launch(void** given, const uint* grid, const uint* group, bool backwards)'
            " {\n  arrays = given;\n  return shim::launch(call, grid, group, backwards);\n}\n"
        )
        path = Path(_built.name) / sha256(source.encode()).hexdigest()[:16]
        path.with_suffix(".cpp").write_text(source)
        command = ["g++", *FLAGS, "-U_FORTIFY_SOURCE", "-fPIC", "-shared", f"-I{FOLDER}", "-o"]
        done = subprocess.run(
            [*command, f"{path}.so", f"{path}.cpp"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ShimError(done.stderr)
        library = ctypes.CDLL(f"{path}.so")
        library.launch.restype = ctypes.c_char_p
        _libraries[text] = library
    return _libraries[text]
