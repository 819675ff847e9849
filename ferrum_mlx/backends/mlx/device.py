"""Where MLX runs, what is free there, and in which form a model's weights go there."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ferrum_mlx import memory
from ferrum_mlx.errors import BackendUnavailableError


@dataclass(frozen=True, slots=True)
class Device:
    """`host` means the CPU route: matmuls and attention through numpy's BLAS, weights in float32."""

    name: str
    host: bool

    @property
    def route(self) -> str:
        """How matmuls are done, and why, in words."""
        if not self.host:
            return "Metal: MLX's own kernels"
        if platform.system() == "Darwin":
            return "CPU: numpy's BLAS (asked for by --device cpu)"
        return "CPU: numpy's OpenBLAS; the reference BLAS in MLX's wheel for Linux is some 30 times slower"

    @property
    def fast_paths(self) -> dict[str, str]:
        """Which there are here, and why the others are off."""
        if not self.host:
            paged = "paged attention in place (where the check at load finds it right)"
            return {"fast_paths": f"Metal's kernels, {paged}, compiled graphs", "fast_paths_off": "none"}
        return {
            "fast_paths": "linear layers and attention through numpy's BLAS, in float32",
            "fast_paths_off": "Metal's kernels (no GPU is used), compiled graphs (they need a C++ compiler)",
        }


# Prompt tokens of a step in which anything decodes, such that the step takes at most some four times as
# long as one that only decodes: arithmetic a token over bytes a step, whatever the size of the model.
# "cpu" was measured with `python -m ferrum_mlx.bench.admission`; "gpu" is inferred from published figures.
PREFILL_WHILE_DECODING = {"cpu": 32, "gpu": 64}
CACHE_LIMIT = 2 << 30  # bytes of freed buffers that MLX keeps; by default it may keep all


def select(wanted: str) -> Device:
    """Make MLX's default device the one wanted ("" takes the GPU where there is one)."""
    gpu = mx.metal.is_available()
    if wanted == "gpu" and not gpu:
        raise BackendUnavailableError(
            "--device gpu: MLX finds no Metal GPU here", "allowed: --device cpu", "or leave --device away"
        )
    if gpu and wanted != "cpu":
        # Some GPUs multiply float32 in TF32, which the exactness checks would take for a fault.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read at MLX's first use of the device
        mx.set_default_device(mx.gpu)
        mx.enable_compile()
        info = mx.device_info()
        mx.set_wired_limit(int(info["max_recommended_working_set_size"]))
        mx.set_cache_limit(CACHE_LIMIT)
        return Device(str(info.get("device_name", "Apple GPU")), host=False)
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # MLX compiles CPU kernels with a C++ compiler at run time; a user may have none
    return Device("cpu", host=True)


def free_memory(device: Device) -> int:
    """Bytes that can be taken without swapping."""
    mx.clear_cache()  # what loading left
    available = memory.available()
    if device.host:
        return available
    return min(available, int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory())


def memory_limit(*, host: bool) -> int:
    """Bytes that this machine can give without swapping, if nothing else ran."""
    total = memory.total()
    metal = None if host else mx.device_info().get("max_recommended_working_set_size")  # none of a CPU
    return total if metal is None else min(total, int(metal))


def to_float32(model: nn.Module) -> str | None:
    """Dequantize and widen a model for the CPU route; a note instead if that would not fit.

    MLX's CPU kernels for 16-bit and quantized weights run at 1.6–3 GFLOP/s; float32 has a BLAS.
    """
    from mlx_lm.utils import dequantize_model

    parameters = num_parameters(model)
    available = memory.available()
    if 4 * parameters > available * 0.8:
        return (
            f"the weights stay as they are: in float32 they need {4 * parameters / 1e9:.1f} GB of "
            f"{available / 1e9:.1f} GB free; expect a slow model on this CPU"
        )
    if any(hasattr(module, "bits") for module in model.modules()):
        dequantize_model(model)
    model.apply(lambda array: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)
    return None


def parameter_arrays(model: nn.Module) -> list[mx.array]:
    return [leaf[1] for leaf in tree_flatten(model.parameters()) if isinstance(leaf[1], mx.array)]


def num_parameters(model: nn.Module) -> int:
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))
