"""A resolved model to a torch executor."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.model_info import ModelInfo


def build_executor(
    resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None]
) -> tuple[TorchExecutor, str, list[str]]:
    """The executor, ready to serve; how matmuls are done and why; the notes a user must see."""
    device = devices.select(config.device)
    narrate("reading the weights")
    model, notes = load_model(resolved, device)
    if config.numerics == "exact" and not device.host:
        notes.append("--numerics exact holds on the CPU only: a GPU's kernels round a row by its company")
    info = model_info(resolved, model, device.name)
    executor = TorchExecutor(model, info, config, free_memory=devices.free_memory(device))
    narrate("checking that paged attention is exact for this model")
    executor.prepare_startup()
    return executor, device.route, notes + executor.notes


def model_info(resolved: ResolvedModel, model: PreTrainedModel, device: str) -> ModelInfo:
    text = model.config.get_text_config()  # multimodal checkpoints nest it
    return ModelInfo(
        model_id=resolved.name,
        model_type=model.config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden_size=getattr(text, "hidden_size", 0),
        num_layers=getattr(text, "num_hidden_layers", 0),
        num_heads=getattr(text, "num_attention_heads", 0),
        num_kv_heads=0,  # these three are what the executor finds the model to use
        head_dim=0,
        vocab_size=0,
        max_sequence_length=max(0, getattr(text, "max_position_embeddings", None) or 0),
        dtype=devices.dtype_name(model.dtype),
        device=device,
        licence=resolved.card.licence if resolved.card else "unknown",
    )


def facts(wanted_device: str = "") -> dict[str, str]:
    """For `doctor`."""
    device = devices.select(wanted_device)
    return {"device": device.name, "matmul": device.route}
