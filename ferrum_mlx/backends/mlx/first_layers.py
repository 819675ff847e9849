"""A model's first layers as a model of its own: embedding, those layers, final norm, head; weights shared."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ferrum_mlx.errors import UnsupportedModelError


def first_layers(model: nn.Module, count: int, model_type: str) -> nn.Module:
    """Modules are copied and arrays are not, so nothing done to one model's modules reaches the other's.

    Raises:
        UnsupportedModelError: no single list of modules holds the layers.
    """
    leaves = [leaf[1] for leaf in tree_flatten(model)]
    arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, mx.array)}
    twin: nn.Module = copy.deepcopy(model, dict[int, Any](arrays))
    first = twin.layers[0]
    owners = [
        (module, name)
        for module in twin.modules()
        for name, value in module.items()
        if isinstance(value, list) and len(value) == len(twin.layers) and value[0] is first
    ]
    if len(owners) != 1:
        raise UnsupportedModelError(
            f"--speculative self: the layers of {model_type} stand in {len(owners)} lists",
            "supported: models that keep them in one",
            "take --speculative ngram",
        )
    owner, name = owners[0]
    owner[name] = owner[name][:count]
    return twin
