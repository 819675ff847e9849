"""Tiny random float32 models of mlx-lm's model types (zoo_configs.py), to be checked on any machine."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from ferrum_mlx.backends.mlx import device as devices
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.zoo_configs import COMMON, LOOPED, PAGED, REFUSED, VOCAB, Config
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, one_line
from ferrum_mlx.model_info import ModelInfo

GAIN = 2.0  # of every matrix: enough for logits that depend on more than the last token
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
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    noise = rng.standard_normal(initial.shape, dtype=np.float32)
    shift = next((by for end, by in SLOW_DECAY.items() if path.endswith(end)), None)
    if shift is not None:
        return mx.array(shift + np.float32(0.3) * noise)
    if initial.ndim < 2:  # norms stay around 1, biases and sinks around 0
        spread = 0.05 if path.endswith("bias") else 0.3  # large biases would drown what a token says
        return initial.astype(mx.float32) + mx.array(spread * noise)
    return mx.array(noise * np.float32(GAIN / np.sqrt(initial.shape[-1])))


def model_type(name: str) -> str:
    return name.split("/")[0]


def info(name: str) -> ModelInfo:
    """As much as an executor reads of it."""
    return ModelInfo(
        model_id=name,
        model_type=model_type(name),
        num_parameters=0,
        hidden_size=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        vocab_size=VOCAB,
        max_sequence_length=512,
        dtype="float32",
        device="cpu",
    )


EXACT_OUTCOME = "exact"


def survey(device: str = "") -> Iterator[tuple[str, str]]:
    """(name, outcome) of every configuration, as it is built, loaded and checked here.

    The check is the one at load: logits of two sequences packed into shared steps against those of the
    model alone. "exact", with the fast paths that are off, or "refused" with the reason.
    """
    selected = devices.select(device)
    config = EngineConfig(numerics="exact", block_size=8, max_model_len=128)
    for name in sorted([*EXACT, *REFUSED], key=str.lower):
        try:
            model = build(name)
            executor = MLXExecutor(model, info(name), config, host=selected.host, free_memory=2**28)
            executor.prepare_startup()
        except FerrumError as error:
            yield name, f"refused: {error.what}"
            continue
        except Exception as error:  # mlx-lm's own, of a type that cannot be built here
            yield name, f"refused: it cannot be built here: {one_line(error)}"
            continue
        off = [why for why in executor.capabilities().off if "at a time" in why or "many sequences" in why]
        yield name, "; ".join([EXACT_OUTCOME, *off])
        executor.shutdown()
