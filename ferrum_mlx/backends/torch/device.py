"""Where torch runs, what is free there, and in which dtype a model's weights go there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ferrum_mlx import memory
from ferrum_mlx.errors import BackendUnavailableError, one_line


@dataclass(frozen=True, slots=True)
class Device:
    """`dtype` is the one that weights are wanted in."""

    name: str
    place: torch.device
    dtype: torch.dtype

    @property
    def host(self) -> bool:
        return self.place.type == "cpu"

    @property
    def route(self) -> str:
        """How matmuls are done, and why, in words."""
        kind = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}[self.place.type]
        if not self.host:
            return f"{kind}: torch's own kernels"
        blas = "MKL" if torch.backends.mkl.is_available() else "its own BLAS"
        return f"{kind}: torch with {blas}, {torch.get_num_threads()} threads"

    @property
    def fast_paths(self) -> dict[str, str]:
        """Which there are here, and why the others are off; each model's load checks those again."""
        kernel, steps = "a Triton kernel for paged attention", "captured decode steps"
        if self.place.type == "cuda" and find_spec("triton"):
            return {"fast_paths": f"{kernel}, {steps}", "fast_paths_off": "none"}
        if self.place.type == "cuda":
            return {"fast_paths": steps, "fast_paths_off": f"{kernel} (the package triton is not installed)"}
        if not self.host:
            return {"fast_paths": "none", "fast_paths_off": f"{kernel}, {steps} (both need CUDA)"}
        on = "packed weights and replayed decode steps"
        kernel = "compiled attention, norms and rotary embeddings"
        if reason := without_cpu_kernel():
            return {"fast_paths": f"{on}, with --numerics fast", "fast_paths_off": f"{kernel} ({reason})"}
        return {"fast_paths": f"{on}, {kernel}, with --numerics fast", "fast_paths_off": "none"}


@cache
def without_cpu_kernel() -> str:
    """Why there can be no compiled kernel for CPUs here; "" where there can."""
    try:
        from ferrum_mlx.backends.torch import cpu_kernel  # noqa: F401
    except ModuleNotFoundError:
        return "numba is not installed: pip install 'ferrum-mlx[cpu]'"
    except Exception as error:  # a numba that does not go with this numpy
        return one_line(error)
    return ""


# Prompt tokens of a step in which anything decodes: see the MLX backend's table, whose reasoning is the
# same. "cpu" and "gpu" are not measured on torch yet.
PREFILL_WHILE_DECODING = {"cpu": 32, "gpu": 64}


def select(wanted: str) -> Device:
    """The device wanted ("" takes a GPU where there is one)."""
    if wanted != "cpu" and torch.cuda.is_available():
        # float32 products would otherwise be TF32 where a library has switched it on.
        torch.backends.cuda.matmul.allow_tf32 = False
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return Device(torch.cuda.get_device_name(), torch.device("cuda"), dtype)
    if wanted != "cpu" and torch.backends.mps.is_available():
        has_bfloat16 = torch.backends.mps.is_macos_or_newer(14, 0)
        dtype = torch.bfloat16 if has_bfloat16 else torch.float16
        return Device("Apple GPU", torch.device("mps"), dtype)
    if wanted == "gpu":
        raise BackendUnavailableError(
            "--device gpu: torch finds neither CUDA nor MPS here",
            "allowed: --device cpu",
            "leave --device away, or install a build of torch for this GPU",
        )
    return Device("cpu", torch.device("cpu"), torch.float32)


def free_memory(device: Device) -> int:
    """Bytes that can be taken without swapping."""
    available = memory.available()
    if device.place.type == "cuda":
        torch.cuda.empty_cache()  # what loading left
        free, _ = torch.cuda.mem_get_info(device.place)
        return free
    if device.place.type == "mps":
        torch.mps.empty_cache()
        return min(available, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return available


def memory_limit(device: torch.device) -> int:
    """Bytes that this machine can give without swapping, if nothing else ran."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = memory.total()
    return min(total, torch.mps.recommended_max_memory()) if device.type == "mps" else total


def weights_dtype(device: Device, stored: torch.dtype, parameters: int) -> tuple[torch.dtype, str | None]:
    """What to load `parameters` weights as, and a note where that is not what the device wants.

    A CPU without bf16 units prefills three to five times faster in float32.
    """
    available = memory.available()
    if device.host and stored != torch.float32 and 4 * parameters > available * 0.8:
        return stored, (
            f"the weights stay {dtype_name(stored)}: in float32 they need {4 * parameters / 1e9:.1f} GB of "
            f"{available / 1e9:.1f} GB free; expect a slow model on this CPU"
        )
    return device.dtype, None


def in_use(device: torch.device, held: int) -> tuple[int, int]:
    """Bytes held now and at the peak; on a CPU, where torch does not count, `held` stands for both."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    return held, held


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on, where it is counted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "mps":
        torch.mps.empty_cache()  # the driver's sum then only grows by what is taken from now on


def upload(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array's values on a device; on CUDA without waiting for what runs there."""
    tensor = torch.from_numpy(array).to(dtype)
    if device.type == "cuda" and tensor.numel():
        # torch gives the pinned copy's memory to nobody else before the transfer is over
        tensor = tensor.pin_memory()
    return send(tensor, device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; to MPS it waits, as the copy may else read memory that is free by then."""
    return tensor.to(device, non_blocking=device.type != "mps")


def indices(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """[n] int64 on a device: indexing by a list would wait for what runs on CUDA."""
    return upload(np.asarray(values, dtype=np.int64), device)


class Download:
    """A tensor's values as they are now, on their way to the host; `read` waits for nothing queued after."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def to_sample(logits: torch.Tensor) -> torch.Tensor:
    """Logits where tokens can be chosen from them: the CPU instead of MPS.

    The noise is made of exact 64-bit integers, ties are told apart by them, and filters sort and cumulate;
    MPS has got each of these wrong in one release of torch or another.
    """
    return logits.float().cpu() if logits.device.type == "mps" else logits


def give_back() -> None:
    """Freed memory of this process to the system; glibc keeps what large temporary arrays leave behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
