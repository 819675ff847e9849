"""Whether a model fits this machine: its weights as a backend keeps them, its KV and its states, beside what
is free.

What lies here is judged by the headers of its files and its config, anything else by its card. No network,
no array library.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_mlx import checkpoint, memory
from ferrum_mlx.catalog import Card, ResolvedModel, choose
from ferrum_mlx.config import DEFAULT_CONTEXT
from ferrum_mlx.errors import FerrumError, ModelFileError, UsageError, one_line, shown
from ferrum_mlx.kept import Kept, check_states, kept_by
from ferrum_mlx.kv.sizing import LEAST_STATES
from ferrum_mlx.packing import check_packing
from ferrum_mlx.plain import size
from ferrum_mlx.weights_size import Route, Weights, of_folder, of_gguf, of_source, weights_of

if TYPE_CHECKING:
    from ferrum_mlx.hub import ModelStatus

WORKSPACE = 256 << 20  # bytes for activations and what a library keeps for itself; by the default model
TIGHT = 0.85  # of what is free; above it, what else runs decides


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


def fit_of(
    model: Card | ModelStatus,
    context: int = DEFAULT_CONTEXT,
    backend: str = "",
    kv_bits: int | None = None,
) -> Fit | None:
    """Whether one sequence fits into what is free now; None where it cannot be told, or is refused.

    Args:
        context: tokens of the sequence; it ends at the model's own limit.
        backend: "mlx", "torch", or "" for what this machine would choose.
        kv_bits: of a number of its KV; None is the model's own dtype.
    """
    route = route_here(backend)
    free = free_here(route)
    if free is None or refusal(model, backend) is not None:
        return None
    card, path = (model, None) if isinstance(model, Card) else (model.card, model.path)
    if path is None:
        config: dict[str, Any] = {}
        weights = _expected(model.alias if isinstance(model, Card) else model.name, backend)
    else:
        config, weights = config_of(path), weights_of(path, card)
    if weights is None:
        return None
    kept = kept_by(config) or (Kept(card.kv, card.states) if card and (card.kv or card.states) else None)
    tokens = min(context, _limit(config) or (card.context if card else 0) or context)
    in_weights, number = weights.kept(route, free), weights.number_bytes(route, free)
    in_cache, words = _cache(kept, tokens, number, kv_bits)
    if not kept and config:
        words += f", how much is not known for {shown(config.get('model_type'))}"
    needed = in_weights + in_cache + WORKSPACE
    return Fit(needed, free, needed <= free, f"weights {size(in_weights)}, {words}; {size(free)} are free")


def _cache(kept: Kept | None, tokens: int, number: int, kv_bits: int | None) -> tuple[int, str]:
    """Bytes of what is kept of one sequence, and the same in words.

    A sequence has LEAST_STATES of its recurrent layers' states: the one it goes on from, a snapshot at its
    prompt's end and one of its answer, which the next turn starts from.
    """
    if kept is None:
        return 0, "KV besides"
    kv = sum(shape.num_bytes(tokens, number, kv_bits) for shape in kept.kv)
    states = sum(shape.num_bytes(number) for shape in kept.states)
    words = [f"KV of {tokens:,} tokens {size(kv)}"] if kept.kv else []
    if states:
        words.append(f"recurrent state {LEAST_STATES} × {size(states)} (its own and two snapshots)")
    return kv + LEAST_STATES * states, ", ".join(words)


def refusal(model: Card | ModelStatus, backend: str = "") -> FerrumError | None:
    """Why loading would refuse a model, as far as headers, config or card say; None where they do not."""
    chosen = backend_here(backend)
    try:
        if isinstance(model, Card):
            check_states(bool(model.states), chosen, model.alias)
        elif model.path is not None:
            check_files(model.path, chosen)
        elif model.card is not None:
            check_states(bool(model.card.states), chosen, model.name)
    except FerrumError as error:
        return error
    except OSError as error:
        return ModelFileError(f"{model.alias if isinstance(model, Card) else model.name}: {one_line(error)}")
    return None


def check_files(path: Path, backend: str) -> None:
    """Whether a backend reads a model's files, as far as their headers and config say.

    Raises:
        ModelFileError: a file that is not sound.
        UnsupportedModelError: the backend does not.
    """
    if path.is_dir():
        checkpoint.check_folder(path)
    config = config_of(path)
    if path.is_dir():
        check_packing(config, backend, path)
    kept = kept_by(config)
    check_states(bool(kept and kept.states), backend, path)


def config_of(path: Path) -> dict[str, Any]:
    """Of a folder, or as a folder would have it of a GGUF file.

    Raises:
        ModelFileError, UnsupportedModelError: as GGUFWeights and read_json do.
    """
    if path.is_file():
        from ferrum_mlx.gguf import GGUFFile
        from ferrum_mlx.gguf_weights import GGUFWeights

        return GGUFWeights(GGUFFile(path)).config
    return checkpoint.read_json(path / "config.json")


def catalogued_bytes(card: Card, context: int) -> int | None:
    """What the card says that weights and one sequence take on Metal, in the form that is best for it."""
    weights = of_source(card, min(card.sources, key=lambda source: source.variant != "mlx-4bit"))
    if weights is None or not card.kv:
        return None
    in_cache, _ = _cache(Kept(card.kv, card.states), context, weights.number_bytes("metal", 0), None)
    return weights.kept("metal", 0) + in_cache + WORKSPACE


def check_weights(resolved: ResolvedModel, route: Route, free: int) -> None:
    """Whether a model's weights have room, before they are read.

    Args:
        free: bytes that the device has free now.

    Raises:
        UsageError: they have not; loading them would swap, or end the process.
        ModelFileError: a file that is not sound.
    """
    is_gguf = resolved.format == "gguf"
    weights = of_gguf(resolved.gguf) if is_gguf else of_folder(resolved.path, resolved.card)
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


def check_context(resolved: ResolvedModel, wanted: int | None) -> None:
    """Whether a context is one that a model takes, before its weights are read.

    Raises:
        UsageError: it takes fewer tokens.
        ModelFileError, UnsupportedModelError: its config cannot be read.
    """
    if wanted is not None and 0 < (limit := _limit(config_of(resolved.path))) < wanted:
        raise UsageError(
            f"--max-model-len is {wanted:,}", f"allowed: at most {limit:,}, {resolved.name}'s own", "lower it"
        )


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


def _is_apple() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _limit(config: dict[str, Any]) -> int:
    """Tokens that a model takes at most; 0 where its config does not say."""
    nested = config.get("text_config")
    said = (nested if isinstance(nested, dict) else config).get("max_position_embeddings")
    return said if type(said) is int and said > 0 else 0


def _expected(name: str, backend: str) -> Weights | None:
    """Of the variant that would be fetched."""
    choice = choose(name, backend)
    return of_source(choice.card, choice.sources[0]) if choice else None
