"""LoRA adapters out of their folders: read, checked, and in one form for every backend.

An adapter turns Linear layers x → W x into x → W x + scale · B (A x). What else adapters can be (DoRA,
trained embeddings or biases, experts) is refused by name: half of one would be another model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ferrum_mlx import memory
from ferrum_mlx.adapter_forms import CONFIG, PLAIN, Form, form_of, layer_of
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, UsageError, cut, one_line, shown
from ferrum_mlx.plain import size

Places = Mapping[str, tuple[int, int] | str]  # module path → (in, out) of a Linear layer, or what else it is
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_AGAIN = "get the adapter again"
_SMALLER = "take an adapter of a lower rank, or free memory"
_PIECE = 1 << 20  # bytes that are hashed at a time
_EXPERTS = ("experts", "switch_mlp")  # each sees some of the rows


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one Linear layer's output: B (A x)."""

    a: np.ndarray  # [rank, in] float32
    b: np.ndarray  # [out, rank] float32, the scale in it


@dataclass(frozen=True, slots=True)
class Adapter:
    """`layers` is by module path; `digest` tells contents apart."""

    name: str
    folder: Path
    form: Form
    layers: Mapping[str, LowRank]
    digest: str

    def __str__(self) -> str:
        return f"the adapter {shown(self.name)} in {self.folder}"


class _Tensor(NamedTuple):
    """One entry of a file's header; `start` is the byte where its values begin."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int


def read_adapters(named: Sequence[tuple[str, str]]) -> list[Adapter]:
    """Those of EngineConfig.adapters, in their order.

    Raises:
        ModelFileError: files that are missing, truncated or altered.
        UnsupportedModelError: adapters that are more than low-rank changes of Linear layers.
        UsageError: values that memory has no room for.
    """
    return [read_adapter(name, Path(folder)) for name, folder in named]


def read_adapter(name: str, folder: Path) -> Adapter:
    form = form_of(folder)
    if not form.file.is_file():
        raise ModelFileError(f"{folder} has no {form.file.name}", next_step=_AGAIN)
    try:
        tensors = _tensors(form.file)
        pairs = _pairs(form, tensors)
        _check_room(form.file, sum(math.prod(tensor.shape) for tensor in tensors.values()))
        with open(form.file, "rb") as file:
            layers = {path: _low_rank(form, file, *pair) for path, pair in pairs.items()}
            digest = _digest(folder / CONFIG, file)
    except OSError as error:
        raise ModelFileError(f"{form.file} cannot be read: {error.strerror}", next_step=_AGAIN) from error
    except MemoryError as error:
        raise UsageError(f"{form.file} needs more memory than is free", next_step=_SMALLER) from error
    return Adapter(name, folder, form, layers, digest)


def check_fits(adapter: Adapter, places: Places) -> None:
    """Whether a model has all that an adapter changes, and the adapter all that it must.

    Raises:
        UnsupportedModelError: it is for another model, or for layers that no adapter can change here.
        ModelFileError: a layer's tensors are missing.
    """
    for path, pair in adapter.layers.items():
        place = places.get(path)
        if place is None:
            raise UnsupportedModelError(
                f"{adapter} changes {cut(path, 200)}, which this model does not have",
                next_step="choose an adapter that was made for this model",
            )
        if isinstance(place, str):
            raise UnsupportedModelError(f"{adapter} changes {path}, a {place}", PLAIN)
        if layer_of(path) is None:
            raise UnsupportedModelError(
                f"{adapter} changes {path}, which sees only the rows that are sampled",
                "allowed: Linear layers inside the model's numbered layers",
            )
        if any(part in _EXPERTS for part in path.split(".")):
            raise UnsupportedModelError(f"{adapter} changes {path}, an expert, which sees only its own rows")
        ends = pair.a.shape[1], pair.b.shape[0]
        if ends != place:
            raise UnsupportedModelError(
                f"{adapter} changes {path} from {ends[0]} inputs to {ends[1]} outputs",
                f"the model's has {place[0]} and {place[1]}",
                "choose an adapter that was made for this model",
            )
    numbers = [number for path in places if (number := layer_of(path)) is not None]
    num_layers = max(numbers, default=-1) + 1
    for path, place in places.items():
        if not isinstance(place, str) and path not in adapter.layers and adapter.form.wants(path, num_layers):
            raise ModelFileError(f"{adapter} should change {path}, and has no tensors for it", "", _AGAIN)


def base_note(adapter: Adapter, model_id: str) -> str | None:
    """What a user must know where an adapter says that it was made for another model."""
    base, model = map(_bare, (adapter.form.base, model_id))
    if not base or base == model:
        return None
    return f"{adapter} says that it was made for {adapter.form.base}; this model is {model_id}"


def _bare(model: str) -> str:
    """A model's name without its owner, and without words that say how it is packed or that it answers chats,
    which aliases leave away."""
    name = model.rstrip("/").rpartition("/")[2].partition(":")[0].lower().removesuffix(".gguf")
    return re.sub(r"[-._](\d+-?bit|bf16|fp?16|mlx|q\d\w*|gguf|it|instruct|chat)(?![a-z0-9])", "", name)


def _tensors(file: Path) -> dict[str, _Tensor]:
    """What the header says of each, by name; nothing of the values is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"), open(file, "rb") as opened:  # it checks lengths and offsets
            start = 8 + int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(start - 8))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{file} is no sound safetensors file: {one_line(error)}", next_step=_AGAIN
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        if facts["dtype"] not in _DTYPES:
            raise UnsupportedModelError(
                f"{file}: {shown(name)} is of {facts['dtype']}", f"allowed: {', '.join(_DTYPES)}"
            )
        tensors[name] = _Tensor(name, tuple(facts["shape"]), facts["dtype"], start + facts["data_offsets"][0])
    return tensors


def _pairs(form: Form, tensors: Mapping[str, _Tensor]) -> dict[str, tuple[_Tensor, _Tensor]]:
    """A and B of each layer, checked against the rank."""
    parts: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        match = form.key.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(f"{form.file} has {shown(name)}", PLAIN)
        path, part = match[1], match[2].lower()
        if len(tensor.shape) != 2:
            raise UnsupportedModelError(
                f"{form.file}: {shown(name)} has the shape {shown(tensor.shape)}", PLAIN
            )
        if tensor.shape[0 if form.by_rows == (part == "a") else 1] != form.rank:
            raise ModelFileError(
                f"{form.file}: {shown(name)} has the shape {tensor.shape}",
                f"allowed: of rank {form.rank}, as {CONFIG} says",
                _AGAIN,
            )
        parts.setdefault(path, {})[part] = tensor
    if not parts:
        raise ModelFileError(f"{form.file} has no tensors", next_step=_AGAIN)
    for path, pair in parts.items():
        if len(pair) < 2:
            missing = "B" if "a" in pair else "A"
            raise ModelFileError(f"{form.file} has no {missing} for {cut(path, 200)}", next_step=_AGAIN)
    return {path: (pair["a"], pair["b"]) for path, pair in parts.items()}


def _check_room(file: Path, values: int) -> None:
    """They are kept in float32; a file may have holes that take no disk, and a header says any size."""
    if (needed := 4 * values) > (free := memory.available()):
        raise UsageError(f"{file} needs {size(needed)} of memory, {size(free)} are free", next_step=_SMALLER)


def _low_rank(form: Form, file: BinaryIO, a: _Tensor, b: _Tensor) -> LowRank:
    parts = [_values(file, form.file, tensor) for tensor in (a, b)]
    parts[1] *= np.float32(form.scale)
    return LowRank(*(part if form.by_rows else part.T for part in parts))


def _values(file: BinaryIO, where: Path, tensor: _Tensor) -> np.ndarray:
    """float32"""
    file.seek(tensor.start)
    values = np.fromfile(file, _DTYPES[tensor.dtype], math.prod(tensor.shape)).reshape(tensor.shape)
    if tensor.dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{where}: {shown(tensor.name)} has values that are not finite", next_step=_AGAIN
        )
    return values


def _digest(config: Path, file: BinaryIO) -> str:
    """Of what an adapter's folder says and holds."""
    digest = hashlib.blake2b(config.read_bytes(), digest_size=16)
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
