"""Tiny random float32 models of transformers' model types (zoo_configs.py), to be checked on any machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ferrum_mlx.backends import zoo
from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.zoo_configs import BOUNDED, COMMON, EXACT, REFUSED
from ferrum_mlx.backends.zoo import Outcome, info, model_type, weight_noise
from ferrum_mlx.config import EngineConfig


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model whose weights are a pure function of (name, seed)."""
    table = EXACT | BOUNDED | {key: config for key, (_, config) in REFUSED.items()}
    config = AutoConfig.for_model(model_type(name), **copy.deepcopy(COMMON | table[name]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for what keeps its initial value
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.from_numpy(weight_noise(path, parameter.shape, seed))
            parameter.copy_(parameter + noise if parameter.ndim < 2 else noise)
    eager: PreTrainedModel = model.eval()
    return eager


def survey(device: str = "") -> Iterator[Outcome]:
    """Every configuration as it is built, loaded and checked here; see the MLX backend's."""
    logging.set_verbosity_error()  # it says much about the odd sizes of these models
    place = devices.select(device).place
    config = EngineConfig(block_size=8)

    def check(name: str) -> list[str]:
        model: Any = build(name)
        executor = TorchExecutor(model.to(place), info(name), config, free_memory=2**28)
        executor.prepare_startup()
        off = list(executor.capabilities().off)
        executor.shutdown()
        return off

    return zoo.survey([*EXACT, *BOUNDED, *REFUSED], check)
