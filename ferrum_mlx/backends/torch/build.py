"""A resolved model to a torch executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch import weights
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.first_layers import first_layers
from ferrum_mlx.backends.torch.layers import inspect_layers
from ferrum_mlx.backends.torch.loader import load_model, stored_weights
from ferrum_mlx.backends.torch.quantized import check_bits
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.fit import check_weights
from ferrum_mlx.model_info import ModelInfo
from ferrum_mlx.weights_size import Route

PACKED = "--numerics fast packs them: int4 where the file has 4 bits, else int8; exact keeps float32"
MEASURED = (
    "NLL +0.1% to +0.2% of float32's, KL 0.002 to 0.003, same likeliest token 94% to 96% "
    "(python -m ferrum_mlx.bench.weights)"
)
POSITIONS = 16  # looked at to see what a layer keeps of a token


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose weights are in memory, before it has KV pools; `notes` are on the weights."""

    model: PreTrainedModel
    info: ModelInfo
    device: devices.Device
    notes: tuple[str, ...]
    kv_bits: int | None

    @property
    def has_state(self) -> bool:
        """Its layers carry more from token to token than keys and values."""
        return False  # the executor refuses such models

    @property
    def kv_bytes_per_token(self) -> int:
        layers = inspect_layers(self.model, self.info.model_type, POSITIONS, self.kv_bits).layers
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
        info = replace(self.info, model_id=name, num_layers=count, num_parameters=_num_parameters(model))
        return replace(self, model=model, info=info, notes=())

    def executor(
        self, config: EngineConfig, narrate: Callable[[str], None], free_memory: int, share: float = 1.0
    ) -> tuple[TorchExecutor, list[str]]:
        """Ready to serve, with that share of the memory; and what a user must see."""
        notes: list[str] = []
        for half in (True, False):
            executor = TorchExecutor(
                self.model, self.info, config, free_memory=free_memory, share=share, half=half
            )
            narrate("checking that paged attention is exact for this model")
            try:
                executor.prepare_startup()
                why = executor.half_in_vain
            except UnsupportedModelError as error:  # it may be that K or V is beyond float16
                if executor.info.kv_dtype != "float16":
                    raise
                why = str(error)
            if not why:
                break
            executor.shutdown()
            notes = [f"K and V are kept in float32 instead of float16: {why}"]
        return executor, [*self.notes, *executor.notes, *notes]


def load(
    resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None], *, packed: bool = True
) -> Loaded:
    """`packed`: on a CPU, with fast numerics, Linear layers are packed (weights.py)."""
    check_bits(config.kv_bits)
    device = devices.select(config.device)
    packed = packed and device.host and config.numerics == "fast"
    route: Route = "packed" if packed else "float32" if device.host else "gpu"
    check_weights(resolved, route, devices.free_memory(device))
    narrate("reading the weights")
    model, notes = load_model(resolved, device, as_stored=packed)
    info = model_info(resolved, model, device.name)
    if packed:
        narrate("packing the weights")
        quantization, said = weights.pack(model, stored_weights(resolved))
        notes += said
        products = "bfloat16" if weights.has_packed(model) else ""
        quality = quality_of(resolved) if products else ""
        info = replace(
            info, dtype="float32", computes_in=products, quantization=quantization, quality=quality
        )
    if config.numerics == "exact" and not device.host:
        notes.append("--numerics exact holds on the CPU only: a GPU's kernels round a row by its company")
    return Loaded(model, info, device, tuple(notes), config.kv_bits)


def build_executor(
    resolved: ResolvedModel, config: EngineConfig, narrate: Callable[[str], None], *, packed: bool = True
) -> tuple[TorchExecutor, str, list[str]]:
    """The executor, ready to serve; how matmuls are done and why; the notes a user must see."""
    loaded = load(resolved, config, narrate, packed=packed)
    executor, notes = loaded.executor(config, narrate, loaded.free_memory)
    return executor, loaded.route, notes


def model_info(resolved: ResolvedModel, model: PreTrainedModel, device: str) -> ModelInfo:
    text = model.config.get_text_config()  # multimodal checkpoints nest it
    return ModelInfo(
        model_id=resolved.name,
        model_type=model.config.model_type,
        num_parameters=_num_parameters(model),
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


def _num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def quality_of(resolved: ResolvedModel) -> str:
    """What packing costs, as far as it was measured."""
    if resolved.card is not None and resolved.card.default and resolved.format == "gguf":
        return MEASURED
    return f"not measured yet: python -m ferrum_mlx.bench.weights -m {resolved.name}"


def facts(wanted_device: str = "") -> dict[str, str]:
    """For `doctor`."""
    device = devices.select(wanted_device)
    weights = {"weights": f"{PACKED}; the default model: {MEASURED}"} if device.host else {}
    return {"device": device.name, "matmul": device.route, **device.fast_paths, **weights}
