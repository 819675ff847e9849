"""LoRA adapters out of their folders: read, checked, and in one form for every backend.

An adapter turns Linear layers x → W x into x → W x + scale · B (A x). What else adapters can be (DoRA,
trained embeddings or biases, experts) is refused by name: half of one would be another model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ferrum_mlx.adapter_forms import CONFIG, PLAIN, Form, form_of, layer_of
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, one_line, shown

Places = Mapping[str, tuple[int, int] | str]  # module path → (in, out) of a Linear layer, or what else it is
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_AGAIN = "get the adapter again"
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


def read_adapters(named: Sequence[tuple[str, str]]) -> list[Adapter]:
    """Those of EngineConfig.adapters, in their order.

    Raises:
        ModelFileError: files that are missing, truncated or altered.
        UnsupportedModelError: adapters that are more than low-rank changes of Linear layers.
    """
    return [read_adapter(name, Path(folder)) for name, folder in named]


def read_adapter(name: str, folder: Path) -> Adapter:
    form = form_of(folder)
    try:
        if not form.file.is_file():
            raise ModelFileError(f"{folder} has no {form.file.name}", next_step=_AGAIN)
        data = form.file.read_bytes()
        digest = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=16)
    except OSError as error:
        raise ModelFileError(f"{form.file} cannot be read: {error.strerror}") from error
    digest.update(data)
    tensors = _tensors(form.file, data)
    return Adapter(name, folder, form, _layers(form, tensors), digest.hexdigest())


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
                f"{adapter} changes {path}, which this model does not have",
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
        size = pair.a.shape[1], pair.b.shape[0]
        if size != place:
            raise UnsupportedModelError(
                f"{adapter} changes {path} from {size[0]} inputs to {size[1]} outputs",
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


def _tensors(file: Path, data: bytes) -> dict[str, np.ndarray]:
    """float32, by name."""
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ModelFileError(
            f"{file} is no sound safetensors file: {one_line(error)}", next_step=_AGAIN
        ) from error
    tensors = {}
    for name, tensor in found:
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise UnsupportedModelError(
                f"{file}: {shown(name)} is of {tensor['dtype']}", f"allowed: {', '.join(_DTYPES)}"
            )
        values = np.frombuffer(bytes(tensor["data"]), dtype).reshape(tensor["shape"])
        if tensor["dtype"] == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values.astype(np.float32)
        if not np.isfinite(tensors[name]).all():
            raise ModelFileError(f"{file}: {shown(name)} has values that are not finite", next_step=_AGAIN)
    return tensors


def _layers(form: Form, tensors: Mapping[str, np.ndarray]) -> dict[str, LowRank]:
    """The pairs of A and B, each checked against the rank."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, values in tensors.items():
        match = form.key.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(f"{form.file} has {shown(name)}", PLAIN)
        path, part = match[1], match[2].lower()
        if values.ndim != 2:
            raise UnsupportedModelError(f"{form.file}: {shown(name)} has the shape {values.shape}", PLAIN)
        values = values if form.by_rows else values.T
        if values.shape[0 if part == "a" else 1] != form.rank:
            raise ModelFileError(
                f"{form.file}: {shown(name)} has the shape {tensors[name].shape}",
                f"allowed: of rank {form.rank}, as {CONFIG} says",
                _AGAIN,
            )
        parts.setdefault(path, {})[part] = values
    if not parts:
        raise ModelFileError(f"{form.file} has no tensors", next_step=_AGAIN)
    for path, pair in parts.items():
        if len(pair) < 2:
            missing = "B" if "a" in pair else "A"
            raise ModelFileError(f"{form.file} has no {missing} for {path}", next_step=_AGAIN)
    scale = np.float32(form.scale)
    return {path: LowRank(pair["a"], scale * pair["b"]) for path, pair in parts.items()}
