"""Tiny random float32 models of mlx-lm's model types (zoo_configs.py), to be checked on any machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from ferrum_mlx.backends import zoo
from ferrum_mlx.backends.mlx import device as devices
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.zoo_configs import COMMON, LOOPED, PAGED, REFUSED
from ferrum_mlx.backends.zoo import Config, Outcome, info, model_type, standard_noise, weight_noise
from ferrum_mlx.config import EngineConfig

# Of states: with weights around 0 they forget a token within ten others, and prove little.
SLOW_DECAY = {"A_log": -4.0, "recurrent_param": -5.0, "w_lora.lora.2.bias": -4.0}
EXACT: dict[str, Config] = PAGED | {name: config for name, (_, config) in LOOPED.items()}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model whose weights are a pure function of (name, seed)."""
    config = EXACT[name] if name in EXACT else REFUSED[name][1]
    config = copy.deepcopy(COMMON | config | {"model_type": model_type(name)})  # some types change theirs
    model: nn.Module
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # for what keeps its initial value
    model = model_class(args_class.from_dict(config))
    initial = dict(tree_flatten(model.parameters()))
    weights = [(path, _weight(path, array, seed)) for path, array in initial.items()]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(path: str, initial: mx.array, seed: int) -> mx.array:
    if not mx.issubdtype(initial.dtype, mx.floating):
        return initial
    shift = next((by for end, by in SLOW_DECAY.items() if path.endswith(end)), None)
    if shift is not None:
        return mx.array(np.float32(shift) + np.float32(0.3) * standard_noise(path, initial.shape, seed))
    noise = mx.array(weight_noise(path, initial.shape, seed))
    return initial.astype(mx.float32) + noise if initial.ndim < 2 else noise


def survey(device: str = "") -> Iterator[Outcome]:
    """Every configuration as it is built, loaded and checked here.

    The check is the one at load: logits of two sequences packed into shared steps against those of the
    model alone.
    """
    selected = devices.select(device)
    config = EngineConfig(numerics="exact", block_size=8, max_model_len=128)

    def check(name: str) -> list[str]:
        executor = MLXExecutor(build(name), info(name), config, host=selected.host, free_memory=2**28)
        executor.prepare_startup()
        off = [why for why in executor.capabilities().off if "at a time" in why or "many sequences" in why]
        executor.shutdown()
        return off

    return zoo.survey([*EXACT, *REFUSED], check)
