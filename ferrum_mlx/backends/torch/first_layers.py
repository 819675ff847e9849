"""A model's first layers as a model of its own: embedding, those layers, final norm, head; weights shared."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from ferrum_mlx.errors import UnsupportedModelError


def first_layers(model: PreTrainedModel, count: int, model_type: str) -> PreTrainedModel:
    """Modules and config are copied and tensors are not, so nothing done to one model reaches the other.

    Raises:
        UnsupportedModelError: no single list of modules holds the layers.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin: PreTrainedModel = copy.deepcopy(model, shared)
    config: Any = twin.config.get_text_config()
    owners = [
        (module, name)
        for module in twin.modules()
        for name, value in module.named_children()
        if isinstance(value, torch.nn.ModuleList) and len(value) == config.num_hidden_layers
    ]
    if len(owners) != 1:
        raise UnsupportedModelError(
            f"--speculative self: {len(owners)} lists of {model_type} have as many modules as it has layers",
            "supported: models with one such list",
            "take --speculative ngram",
        )
    owner, name = owners[0]
    setattr(owner, name, getattr(owner, name)[:count])
    config.num_hidden_layers = count
    return twin
