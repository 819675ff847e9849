"""A resolved model to an MLX executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ferrum_mlx.backends.mlx import device as devices
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.first_layers import first_layers
from ferrum_mlx.backends.mlx.layers import inspect_layers
from ferrum_mlx.backends.mlx.loader import load_model
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.fit import check_weights
from ferrum_mlx.model_info import ModelInfo

_NO_WINDOW = {"gemma2", "mistral", "phi3"}  # model types whose classes in mlx-lm attend to everything


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose weights are in memory, before it has KV pools; `notes` are on the weights."""

    model: nn.Module
    info: ModelInfo
    device: devices.Device
    notes: tuple[str, ...]
    kv_bits: int | None

    @property
    def has_state(self) -> bool:
        """Its layers carry more from token to token than keys and values."""
        return bool(inspect_layers(self.model, self.info.model_type).states)

    @property
    def kv_bytes_per_token(self) -> int:
        layers = inspect_layers(self.model, self.info.model_type, self.kv_bits).kv
        return sum(layer.bytes_per_token for layer in layers)

    @property
    def route(self) -> str:
        """How matmuls are done, and why."""
        return self.device.route

    @property
    def free_memory(self) -> int:
        return devices.free_memory(self.device)

    def first_layers(self, count: int) -> Loaded:
        """Its first layers as a model of their own, the weights shared; before it has an executor."""
        model = first_layers(self.model, count, self.info.model_type)
        name = f"the first {count} layers of {self.info.model_id}"
        info = replace(
            self.info, model_id=name, num_layers=count, num_parameters=devices.num_parameters(model)
        )
        return replace(self, model=model, info=info, notes=())

    def executor(
        self, config: EngineConfig, narrate: Callable[[str], None], free_memory: int, share: float = 1.0
    ) -> tuple[MLXExecutor, list[str]]:
        """Ready to serve, with that share of the memory; and what a user must see."""
        executor = MLXExecutor(
            self.model, self.info, config, host=self.device.host, free_memory=free_memory, share=share
        )
        narrate("checking that paged attention is exact for this model")
        executor.prepare_startup()
        return executor, [*self.notes, *executor.notes]


def load(resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None]) -> Loaded:
    device = devices.select(config.device)
    check_weights(resolved, "mlx-cpu" if device.host else "metal", devices.free_memory(device))
    notes: list[str] = []
    model, model_config = load_model(resolved, quantized=not device.host)
    quantization = quantization_of(model)
    if note := _window_note(model_config):
        notes.append(note)
    if not device.host and (unpacked := model_config.get("unpacked")):
        size = sum(unpacked.values())
        notes.append(
            f"the file's {', '.join(sorted(unpacked))} weights are in float32 here: {size / 1e9:.2f} GB"
        )
    if device.host and (note := devices.to_float32(model)):
        notes.append(note)
    if config.numerics == "exact" and not device.host:
        notes.append(
            "--numerics exact holds on the CPU only: Metal's kernels round a row by the shape it is in"
        )
    narrate("reading the weights")
    mx.eval(model.parameters())
    info = model_info(resolved, model, model_config, device.name, quantization)
    return Loaded(model, info, device, tuple(notes), config.kv_bits)


def build_executor(
    resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None]
) -> tuple[MLXExecutor, str, list[str]]:
    """The executor, ready to serve; how matmuls are done and why; the notes a user must see."""
    loaded = load(resolved, config, narrate)
    executor, notes = loaded.executor(config, narrate, loaded.free_memory)
    return executor, loaded.route, notes


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


def quantization_of(model: nn.Module) -> str:
    """How the layers of a model are packed, in words; "none" if none is."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        if hasattr(module, "bits"):
            kind = "" if module.mode == "affine" else f" {module.mode}"
            kinds[f"{module.bits}-bit{kind}, groups of {module.group_size}"] += 1
        elif type(module) in (nn.Linear, nn.Embedding):
            kinds["unpacked"] += 1
    if set(kinds) <= {"unpacked"}:
        return "none"
    return " and ".join(f"{kind} ({count} layers)" for kind, count in kinds.most_common())


def _window_note(config: dict[str, Any]) -> str | None:
    """What a user must know of classes that attend to everything, whatever the config says."""
    kind, text = config["model_type"], config.get("text_config") or config
    window, length = text.get("sliding_window"), text.get("max_position_embeddings")
    if kind not in _NO_WINDOW or not window or not length or window >= length:
        return None
    return (
        f"mlx-lm's {kind} has no sliding window: past {window:,} tokens of context its answers part from the "
        "model's own; --backend torch has it"
    )


def facts(wanted_device: str = "") -> dict[str, str]:
    """For `doctor`."""
    device = devices.select(wanted_device)
    return {"device": device.name, "matmul": device.route, **device.fast_paths}
