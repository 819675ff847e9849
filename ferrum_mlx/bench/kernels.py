"""`ferrum-mlx bench --kernels`: attention of decode rows alone, through the Metal kernel and by gathering.

Each call reads the K and V of all sequences once. Calls are chained, each one's result being the next
one's queries, so that the device cannot run two at a time; what MLX needs to hand them over counts, Python's
part of building them does not. "slice" is what MLX's own attention takes for one sequence whose blocks lie
in a row, without gathering.

call_s              of one call
read_bytes_per_s    the bytes of K and V that it needs, over that
bandwidth_fraction  of what this machine reads, measured in the same run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from ferrum_mlx.bench import machine
from ferrum_mlx.bench.ceiling import bandwidth
from ferrum_mlx.bench.report import Report
from ferrum_mlx.bench.runner import Results
from ferrum_mlx.bench.trace import Figures
from ferrum_mlx.errors import BackendUnavailableError, FerrumError

if TYPE_CHECKING:
    from ferrum_mlx.backends.mlx.kernels.launch import MetalAttention

KERNEL, GATHER, SLICE = "kernel", "gather", "slice"
BLOCK_SIZE = 16
CALLS = 32  # in a chain

Measure = Callable[[], float]  # seconds a call


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of layer in float16, and the numbers of sequences and of keys of each that are tried."""

    heads: int
    kv_heads: int
    dim: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]

    def __str__(self) -> str:
        return f"attention alone, {self.heads} query heads over {self.kv_heads} KV heads of {self.dim}"

    @property
    def kv(self) -> tuple[int, int]:
        return self.kv_heads, self.dim

    def num_bytes(self, batch: int, context: int) -> int:
        """Of K and V that a call reads."""
        return 2 * 2 * batch * context * self.kv_heads * self.dim


LLAMA_8B = Shape(32, 8, 128, (1, 8), (128, 2048, 8192))


def on_this_mac(device: str, reps: int, say: Callable[[str], None]) -> Report:
    """Raises BackendUnavailableError where there is no Metal, or `device` is the CPU."""
    if device == "cpu" or not mx.metal.is_available():
        where = "there is no Metal GPU here" if device != "cpu" else "--device cpu"
        raise BackendUnavailableError(
            f"--kernels: {where}, and the kernels run nowhere else",
            next_step="run it on a Mac with Apple silicon",
        )
    from ferrum_mlx.backends.mlx.device import select

    return report(reps, say, device=select("gpu").name)


def report(
    reps: int,
    say: Callable[[str], None],
    *,
    device: str,
    shape: Shape = LLAMA_8B,
    make: Callable[[], MetalAttention] | None = None,
) -> Report:
    """Measure; `make` stands in for the kernel.

    Raises:
        FerrumError: the kernel computes something else.
    """
    from ferrum_mlx.backends.mlx.kernels.launch import MetalAttention

    kernel = (make or MetalAttention)()
    results, pool_bytes, complete = Results(), 0, True
    say("measuring how fast memory is read")
    ceiling = bandwidth("mlx", device)
    try:
        _check(kernel, shape)
        for batch in shape.batches:
            for context in shape.contexts:
                say(f"{batch} × {context} keys")
                systems = dict(_systems(kernel, shape, batch, context))
                pool_bytes = max(pool_bytes, mx.get_active_memory())
                for rep in range(reps):
                    for name in systems if rep % 2 == 0 else reversed(systems):
                        figures = _figures(systems[name](), shape.num_bytes(batch, context), ceiling)
                        results.runs.setdefault((f"{context} keys", batch, name), {})[rep] = figures
    except KeyboardInterrupt:
        complete = False
    results.methods = dict.fromkeys(results.runs, "")
    return Report(
        results=results,
        ours=KERNEL,
        machine=machine.facts("mlx"),
        engine=_facts(shape, device, pool_bytes),
        settings={"tool": machine.tool(), "reps": reps, "seed": 0},
        absent={},
        bandwidth=ceiling,
        complete=complete,
    )


def _check(kernel: MetalAttention, shape: Shape) -> None:
    from ferrum_mlx.backends.mlx.kernels.check import difference
    from ferrum_mlx.backends.mlx.kernels.launch import How
    from ferrum_mlx.backends.mlx.kernels.tables import Asked
    from ferrum_mlx.backends.mlx.kernels.trial import trial_storage

    storage = trial_storage(1, shape.kv, shape.kv, mx.float16)
    storage.asked = Asked(shape.heads, mx.float16, How(shape.dim**-0.5, None, None))
    if reason := difference(kernel, storage, BLOCK_SIZE):
        raise FerrumError(f"the kernel computes something else: {reason}; so nothing is measured")


def _systems(kernel: MetalAttention, shape: Shape, batch: int, context: int) -> Iterator[tuple[str, Measure]]:
    """Each has run once."""
    for name in (KERNEL, GATHER, SLICE):
        if name != SLICE or batch == 1:
            measure = _measure(kernel if name == KERNEL else None, shape, batch, context, name != SLICE)
            measure()
            yield name, measure


def _measure(
    kernel: MetalAttention | None,
    shape: Shape,
    batch: int,
    context: int,
    apart: bool,
) -> Measure:
    from ferrum_mlx.backends.mlx.kernels.trial import trial_step, trial_storage

    step, num_slots = trial_step([context] * batch, 1, BLOCK_SIZE, None, apart=apart)
    storage = trial_storage(num_slots, shape.kv, shape.kv, mx.float16)
    storage.kernel = kernel
    queries = mx.random.normal((batch, shape.heads, 1, shape.dim), dtype=mx.float16)
    mx.eval(queries, *storage.arrays())

    def measure() -> float:
        rows = queries
        for _ in range(CALLS):
            rows = storage.attend(step, rows, None, shape.dim**-0.5, None)
        started = perf_counter()
        mx.eval(rows)
        return (perf_counter() - started) / CALLS

    return measure


def _figures(seconds: float, num_bytes: int, ceiling: float) -> Figures:
    speed = num_bytes / seconds
    return {"call_s": seconds, "read_bytes_per_s": speed, "bandwidth_fraction": speed / ceiling}


def _facts(shape: Shape, device: str, pool_bytes: int) -> dict[str, object]:
    """As of an engine, which there is none of."""
    return {
        "model": str(shape),
        "dtype": "float16",
        "quantization": "none",
        "quality": "",
        "backend": "mlx",
        "device": device,
        "numerics": "fast",
        "speculation_why": "",
        "parameter_bytes": 0,
        "kv_pool_bytes": pool_bytes,
        "peak_rss_bytes": machine.peak_rss(),
    }
