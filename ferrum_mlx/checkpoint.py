"""A checkpoint folder's files, checked before anything is made of them: a config decides what is allocated.

Sizes that a config names are believed only where the weights files' headers have them. A weights file is
checked by safetensors itself: length, offsets and types of its header, before any of its data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, one_line, shown
from ferrum_mlx.files import inside

MAX_JSON = 64 << 20  # bytes; the largest known indexes and vocabularies take half of it
MOST = 2**31 - 1  # of any size or count
_AGAIN = "get the model again"
_COUNT = re.compile(r"(_size|_dim|_rank|heads|layers|experts|positions|embeddings|^n_\w+|^d_\w+)$")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_WHOLE = (*_LAYERS, *_WIDTHS, "vocab_size", "max_position_embeddings")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_FINITE = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "norm_eps", "factor")
_NESTED = 20  # configs in configs

Shapes = Mapping[str, tuple[int, ...]]


class Tensor(NamedTuple):
    """What a header says of a tensor; `dtype` in safetensors' words."""

    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A file's object.

    Raises:
        ModelFileError: it is not there, not JSON, no object, or larger or nested deeper than any real one.
    """
    try:
        check_file(path, MAX_JSON)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not sound JSON: {one_line(error)}", next_step=_AGAIN) from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} holds no JSON object", next_step=_AGAIN)
    return found


def check_file(path: Path, most: int | None = None) -> None:
    """Whether a file can be read to its end.

    Args:
        most: bytes that it may have.

    Raises:
        ModelFileError: it is too large, or none: a pipe waits for ever, a device has no end, a link may lead
            to itself.
    """
    if not path.is_file():
        there = path.exists() or path.is_symlink()
        raise ModelFileError(f"{path} {'is no file' if there else 'is not there'}", next_step=_AGAIN)
    if not os.access(path, os.R_OK):
        raise ModelFileError(f"{path} cannot be read: permission denied", next_step="check its permissions")
    if most is not None and (nbytes := path.stat().st_size) > most:
        raise ModelFileError(f"{path} has {nbytes} bytes", f"at most {most} are read", _AGAIN)


def check_folder(folder: Path) -> Shapes:
    """The shapes of a folder's tensors, as stored.

    Raises:
        ModelFileError: a file that is missing, truncated or altered; a config that does not fit the weights.
        UnsupportedModelError: a folder that wants a program of its own to be run.
    """
    shapes = stored_shapes(folder)
    config = read_json(folder / "config.json")
    if isinstance(config.get("model_file"), str):  # as mlx-lm runs it
        raise UnsupportedModelError(
            f"{folder} brings its own model code, {shown(config['model_file'])}, which is never run",
            next_step="choose another model",
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(f"{folder / 'config.json'} names no model_type", next_step=_AGAIN)
    check_sizes(config, shapes, folder / "config.json")
    return shapes


def check_sizes(config: dict[str, Any], shapes: Shapes, where: Path) -> None:
    """Whether a config's sizes can be those of tensors of such shapes.

    Raises:
        ModelFileError: they can not.
    """
    _check_numbers(config, where, _NESTED)
    nested = config.get("text_config")
    if nested and isinstance(nested, (str, int, float, list)):  # whatever else JSON has
        raise _unfit(where, "text_config", nested, "a config is expected")
    text = {**config, **nested} if isinstance(nested, dict) else config
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    sizes = {size for shape in shapes.values() for size in shape}
    for key, value in text.items():
        if not isinstance(value, int) or isinstance(value, bool):
            if key in _WHOLE and value is not None:
                raise _unfit(where, key, value, "a whole number is expected")
            continue
        if key in _LAYERS and not 1 <= value <= len(shapes):
            raise _unfit(where, key, value, f"the weights are {len(shapes)} tensors")
        if key in _HEADS and value < 1:
            raise _unfit(where, key, value, "at least 1 is expected")
        if key in _WIDTHS and value not in sizes:
            raise _unfit(where, key, value, "no tensor of the weights has it")
        if key.endswith(("heads", "head_dim", "experts", "vocab_size")) and value > max(widest, 1024):
            raise _unfit(where, key, value, f"the largest dimension of the weights is {widest}")


def check_scale(wanted: int, shapes: Shapes, where: Path) -> None:
    """Whether the weights are as many as a model has, about: what is missing would be allocated.

    Args:
        wanted: values that the model built from the config holds.

    Raises:
        ModelFileError: they are not.
    """
    found = sum(math.prod(shape) for shape in shapes.values())
    if wanted > 2 * found + (1 << 28):  # twice: tied weights; the rest: tables and masks of attention
        raise ModelFileError(
            f"{where}: the config describes {wanted:,} values, the weights are {found:,}", next_step=_AGAIN
        )


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a folder, by the headers of its weights files.

    Raises:
        ModelFileError: a file that is missing, truncated or altered.
    """
    return {name: tensor.shape for name, tensor in stored(folder).items()}


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name, by the headers of its weights files.

    Raises:
        ModelFileError: a file that is missing, truncated or altered.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for file in _weights_files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118
                    entry = opened.get_slice(name)
                    tensors[name] = Tensor(tuple(entry.get_shape()), entry.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{file} is no sound safetensors file: {one_line(error)}", next_step=_AGAIN
            ) from error
    return tensors


def _weights_files(folder: Path) -> list[Path]:
    """All that lie there, and all that the index names."""
    found = set(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelFileError(f"{index} maps no weights to files", next_step=_AGAIN)
        for name in set(names.values()):
            if not (file := inside(folder, name)).is_file():
                raise ModelFileError(f"{index} names {shown(name)}, which is not there", next_step=_AGAIN)
            found.add(file)
    if not found:
        raise ModelFileError(f"{folder} has no model*.safetensors", next_step=_AGAIN)
    for file in found:
        check_file(file)
    return sorted(found)


def _check_numbers(values: dict[str, Any], where: Path, depth: int) -> None:
    if not depth:
        raise ModelFileError(f"{where} is nested too deep", next_step=_AGAIN)
    for key, value in values.items():
        if isinstance(value, dict):
            _check_numbers(value, where, depth - 1)
        elif isinstance(value, (int, float)) and _COUNT.search(key) and not -1 <= value <= MOST:
            raise _unfit(where, key, value, f"0 to {MOST:,} are expected")
        elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key in _FINITE)):
            raise _unfit(where, key, value, "a finite number is expected")


def _unfit(where: Path, key: str, value: object, why: str) -> ModelFileError:
    return ModelFileError(f"{where}: {key} is {shown(value)}", why, _AGAIN)
