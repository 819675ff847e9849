"""A resolved model to an MLX executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ferrum_mlx.backends.mlx import device as devices
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.model_info import ModelInfo


def build_executor(
    resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None]
) -> tuple[MLXExecutor, str, list[str]]:
    """The executor, ready to serve; how matmuls are done and why; the notes a user must see."""
    device = devices.select(config.device)
    notes: list[str] = []
    model, model_config = load_model(resolved, quantized=not device.host)
    quantization = _quantization(model_config)
    if device.host and (note := devices.to_float32(model)):
        notes.append(note)
    if config.numerics == "exact" and not device.host:
        notes.append(
            "--numerics exact holds on the CPU only: Metal's kernels round a row by the shape it is in"
        )
    narrate("reading the weights")
    mx.eval(model.parameters())
    info = model_info(resolved, model, model_config, device.name, quantization)
    free = devices.free_memory(device)
    executor = MLXExecutor(model, info, config, host=device.host, free_memory=free)
    narrate("checking that paged attention is exact for this model")
    executor.prepare_startup()
    return executor, device.route, notes + executor.notes


def model_info(
    resolved: ResolvedModel, model: nn.Module, config: dict[str, Any], device: str, quantization: str
) -> ModelInfo:
    text = config.get("text_config") or config  # multimodal checkpoints nest it
    dtypes = [a.dtype for a in devices.parameter_arrays(model) if mx.issubdtype(a.dtype, mx.floating)]
    return ModelInfo(
        model_id=resolved.name,
        model_type=config["model_type"],
        num_parameters=devices.num_parameters(model),
        hidden_size=text.get("hidden_size", 0),
        num_layers=len(model.layers),
        num_heads=text.get("num_attention_heads", 0),
        num_kv_heads=0,  # these three are what the executor finds the model to use
        head_dim=0,
        vocab_size=0,
        max_sequence_length=max(0, text.get("max_position_embeddings") or 0),
        dtype=str(max(dtypes, key=dtypes.count)).removeprefix("mlx.core."),
        device=device,
        quantization=quantization,
        licence=resolved.card.licence if resolved.card else "unknown",
    )


def _quantization(config: dict[str, Any]) -> str:
    quantization = config.get("quantization")
    return f"{quantization['bits']}-bit, groups of {quantization['group_size']}" if quantization else "none"


def facts(wanted_device: str = "") -> dict[str, str]:
    """For `doctor`."""
    device = devices.select(wanted_device)
    return {"device": device.name, "matmul": device.route}
