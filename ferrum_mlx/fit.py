"""Whether a model fits this machine: its weights as a backend keeps them, and its KV, beside what is free.

What lies here is judged by the headers of its files, anything else by its card. No network, no array library.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ferrum_mlx import checkpoint, memory
from ferrum_mlx.catalog import Card, ResolvedModel, Source, choose
from ferrum_mlx.config import DEFAULT_CONTEXT
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.plain import size

if TYPE_CHECKING:
    from ferrum_mlx.gguf import GGUFFile
    from ferrum_mlx.hub import ModelStatus

# How weights are kept: by MLX on Metal and on a CPU; by torch packed and in float32 on a CPU, and on a GPU.
Route = Literal["metal", "mlx-cpu", "packed", "float32", "gpu"]
KV_BYTES: dict[Route, int] = {"metal": 2, "mlx-cpu": 4, "packed": 4, "float32": 4, "gpu": 2}  # of a number
WORKSPACE = 256 << 20  # bytes for activations and what a library keeps for itself; by the default model
TIGHT = 0.85  # of what is free; above it, what else runs decides
FLOAT32_SHARE = 0.8  # of what is free may go to float32 weights, before they stay as they are stored
# Bytes a number of weights that are not here yet: 16 bits; 4 bits with a scale and a bias of 16 bits for 64;
# Q4_K_M on average.
_STORED = {"safetensors": 2.0, "mlx-4bit": 4.5 / 8, "gguf": 4.85 / 8}
_K_QUANTS_BITS = 6 * 5 / 6 + 32 / 6  # of Q4_K_M on Metal: a sixth of it is no Q4_K
_AFFINE_BITS = {
    "Q4_0": 6,
    "Q4_1": 6,
    "Q4_K": 6,
    "Q8_0": 10,
}  # on Metal: a scale and a bias of 32 bits for 32
# At the peak of packing a GGUF on a CPU (bench/NOTES.md), bytes a number: of a Linear layer, whose 4-bit
# codes are kept twice with their scales, or 8-bit ones once; of the table, in float32 when it is read, then
# in 16 bits, and in 8 as the head; of a model whose table is not known yet.
_PACKED_BYTES, _TABLE_BYTES, _PACKED_UNSEEN = 1.125, 7, 2


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes that a model takes and that are free; `why` has both in words."""

    needed_bytes: int
    available_bytes: int
    fits: bool
    why: str

    @property
    def tight(self) -> bool:
        return self.fits and self.needed_bytes > TIGHT * self.available_bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """What is known of a model's weights.

    Attributes:
        values: numbers, unpacked.
        nbytes: in the files.
        is_gguf: a GGUF file's are unpacked when they are read, unless Metal multiplies with their codes.
        on_metal: bytes there.
        packed: bytes at the peak of packing them on a CPU.
    """

    values: int
    nbytes: int
    is_gguf: bool
    on_metal: int
    packed: int

    def kept(self, route: Route, free: int) -> int:
        """Bytes of memory that loading them takes at its peak, which is measured in bench/NOTES.md."""
        if route == "metal":
            return self.on_metal
        if route == "gpu":
            return 2 * self.values
        if route == "packed":
            return self.packed
        if self.is_gguf:
            return 4 * self.values
        return 4 * self.values if 4 * self.values <= FLOAT32_SHARE * free else self.nbytes


def fit_of(
    model: Card | ModelStatus,
    context: int = DEFAULT_CONTEXT,
    backend: str = "",
    kv_bits: int | None = None,
) -> Fit | None:
    """Whether one sequence of `context` tokens fits into what is free now; None where it cannot be told.

    Args:
        backend: "mlx", "torch", or "" for what this machine would choose.
        kv_bits: of a number of its KV; None is the model's own dtype.
    """
    route = route_here(backend)
    card = model if isinstance(model, Card) else model.card
    if isinstance(model, Card):
        weights = _expected(model.alias, backend)
    else:
        weights = _expected(model.name, backend) if model.path is None else _of_files(model.path, card)
    free = free_here(route)
    if weights is None or free is None:
        return None
    kept = weights.kept(route, free)
    kv = card.kv_bytes(context, KV_BYTES[route], kv_bits) if card else 0
    needed = kept + kv + WORKSPACE
    of_kv = f"KV of {context:,} tokens {size(kv)}" if kv else "KV besides"
    why = f"weights {size(kept)}, {of_kv}; {size(free)} are free"
    return Fit(needed, free, needed <= free, why)


def catalogued_bytes(card: Card, context: int) -> int | None:
    """What the card says that weights and the KV of one sequence take on Metal, in the form best for it."""
    if card.parameters is None or not card.kv:
        return None
    source = min(card.sources, key=lambda source: source.variant != "mlx-4bit")
    return _of_source(card.parameters, source).on_metal + card.kv_bytes(context) + WORKSPACE


def check_weights(resolved: ResolvedModel, route: Route, free: int) -> None:
    """Whether a model's weights have room, before they are read.

    Args:
        free: bytes that the device has free now.

    Raises:
        UsageError: they have not; loading them would swap, or end the process.
        ModelFileError: a file that is not sound.
    """
    is_gguf = resolved.format == "gguf"
    weights = _of_gguf(resolved.gguf) if is_gguf else _of_folder(resolved.path, resolved.card)
    needed = weights.kept(route, free)
    if needed <= free:
        return
    other = "a smaller model"
    if resolved.card is not None and len(resolved.card.variants) > 1:
        other += f", or another variant ({', '.join(resolved.card.variants)})"
    raise UsageError(
        f"{resolved.name} needs {size(needed)} of memory for its weights, {size(free)} are free",
        next_step=f"take {other}, or free memory; see ferrum-mlx models list",
    )


def weights_of(path: Path, card: Card | None = None) -> Weights:
    """Of a model's files, by their headers.

    Raises:
        ModelFileError: a file that is not sound.
    """
    if path.is_file():
        from ferrum_mlx.gguf import GGUFFile

        return _of_gguf(GGUFFile(path))
    return _of_folder(path, card)


def backend_here(wanted: str = "auto") -> str:
    """mlx or torch: the one asked for, or what this machine would take; build.choose_backend has the last
    word."""
    if wanted in ("mlx", "torch"):
        return wanted
    return "mlx" if _is_apple() and find_spec("mlx") else "torch" if find_spec("torch") else "mlx"


def route_here(backend: str = "") -> Route:
    """How this machine would keep weights."""
    if backend_here(backend) == "mlx":
        return "metal" if _is_apple() else "mlx-cpu"
    return "gpu" if _is_apple() or Path("/proc/driver/nvidia/version").exists() else "packed"


def free_here(route: Route) -> int | None:
    """Bytes that are free where the weights go, as far as it can be told without the backend's library."""
    free = memory.available()
    if route == "metal" or (route == "gpu" and platform.system() == "Darwin"):
        return min(free, memory.metal_limit() or free)
    return memory.cuda_free() if route == "gpu" else free


def _of_folder(path: Path, card: Card | None) -> Weights:
    values = checkpoint.num_values(path)  # first: it checks the files
    nbytes = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    return Weights(card.parameters or values if card else values, nbytes, False, nbytes, nbytes)


def _is_apple() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _of_gguf(gguf: GGUFFile) -> Weights:
    tensors = gguf.tensors
    values = sum(math.prod(each.shape) for each in tensors.values())
    nbytes = sum(each.nbytes for each in tensors.values())
    on_metal = sum(math.prod(each.shape) * _AFFINE_BITS.get(each.type, 32) // 8 for each in tensors.values())
    table = math.prod(tensors["token_embd.weight"].shape) if "token_embd.weight" in tensors else 0
    packed = int(_PACKED_BYTES * (values - table)) + _TABLE_BYTES * table
    return Weights(values, nbytes, True, on_metal, packed)


def _of_files(path: Path, card: Card | None) -> Weights | None:
    try:
        return weights_of(path, card)
    except (FerrumError, OSError):  # loading it says what is wrong
        return None


def _expected(name: str, backend: str) -> Weights | None:
    """Of the variant that would be fetched."""
    choice = choose(name, backend)
    if choice is None or choice.card.parameters is None:
        return None
    return _of_source(choice.card.parameters, choice.sources[0])


def _of_source(values: int, source: Source) -> Weights:
    nbytes = source.size or int(values * _STORED[source.variant])
    if source.format == "safetensors":
        return Weights(values, nbytes, False, nbytes, nbytes)
    return Weights(values, nbytes, True, int(values * _K_QUANTS_BITS / 8), _PACKED_UNSEEN * values)
