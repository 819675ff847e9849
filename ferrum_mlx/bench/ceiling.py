"""How fast this machine reads memory, and how much of that a decode step reaches.

A step reads every weight once and the keys and values of every stream. That is what is counted, so it is
an upper bound for a mixture of experts, for sliding windows, and where the embedding table is a matrix of
its own: such a step reads less.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter

import numpy as np

from ferrum_mlx.bench.trace import Figures
from ferrum_mlx.bench.workloads import Case
from ferrum_mlx.model_info import MemoryRequirements

BUFFER_BYTES = 512 << 20  # larger than the last-level cache of most machines
_PASSES = 7


def num_threads(backend: str) -> int:
    """How many threads the engine multiplies with on a CPU."""
    if backend == "torch":
        import torch

        return torch.get_num_threads()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bandwidth(backend: str, device: str) -> float:
    """Bytes a second, the best of several passes over a large buffer, read where the engine computes."""
    read = _reader(backend, device)
    return BUFFER_BYTES / min(_seconds(read) for _ in range(_PASSES))


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _reader(backend: str, device: str) -> Callable[[], object]:
    count = BUFFER_BYTES // 4
    if backend == "torch":
        import torch

        kind = "cpu" if device == "cpu" else "cuda" if torch.cuda.is_available() else "mps"
        tensor = torch.ones(count, dtype=torch.float32, device=kind)
        return lambda: float(tensor.max())
    if backend == "mlx" and device != "cpu":
        import mlx.core as mx

        array = mx.ones((count,), dtype=mx.float32)
        mx.eval(array)
        return lambda: mx.max(array).item()
    buffer = np.ones(count, dtype=np.float32)
    return lambda: buffer.dot(buffer)  # by the BLAS that the engine multiplies with, and its threads


def step_figures(
    case: Case, memory: MemoryRequirements, figures: Figures, bytes_per_second: float
) -> Figures:
    """Of a decode of one token a stream and step: what a step reads on average, and the share reached."""
    if case.kind != "tg" or "decode_tps" not in figures:
        return {}
    kv = memory.kv_bytes_per_token * case.streams
    states = memory.state_bytes * case.streams
    read = memory.parameter_bytes + states + kv * (case.depth + case.tokens / 2)
    reached = figures["decode_tps"] / case.streams * read
    return {
        "kv_bytes": float(kv * (case.depth + case.tokens)),
        "step_bytes": read,
        "bandwidth_fraction": reached / bytes_per_second,
    }
