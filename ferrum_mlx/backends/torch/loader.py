"""Models into transformers' own classes: safetensors folders, and GGUFs from their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config

from ferrum_mlx import checkpoint
from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch.device import Device
from ferrum_mlx.backends.torch.weights import is_unread, placeholder
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import FerrumError, ModelFileError, UnsupportedModelError, one_line
from ferrum_mlx.gguf_quants import QuantizedTensor
from ferrum_mlx.gguf_weights import GGUFWeights
from ferrum_mlx.kept import check_states, kept_by
from ferrum_mlx.packing import check_packing, packing_of

logging.disable_progress_bar()  # ours narrates, and stdout is data
logging.set_verbosity_error()  # what matters of it is checked here


def load_model(
    resolved: ResolvedModel, device: Device, *, as_stored: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """The model on its device, and notes for the user.

    Args:
        as_stored: 16-bit weights of a folder stay what they are, whatever the device would rather have, and
            the Linear layers of a GGUF are left unread, for `weights.pack` to read one at a time.

    Raises:
        ModelFileError: files missing, truncated or not fitting the config.
        UnsupportedModelError: a model that transformers, or our GGUF reader, has no class for.
    """
    model: Any
    notes: list[str] = []
    if resolved.format == "gguf":
        model = _load_gguf(resolved, device, as_stored)
    else:
        model, notes = _load_folder(resolved.path, device, as_stored)
    if device.place.type == "mps":
        model.set_attn_implementation("eager")  # its other attention is wrong there: see pools.attention
    return model.to(device.place).eval(), notes


def _load_folder(folder: Path, device: Device, as_stored: bool) -> tuple[PreTrainedModel, list[str]]:
    shapes = checkpoint.check_folder(folder)
    stored_config = checkpoint.read_json(folder / "config.json")
    check_packing(stored_config, "torch", folder)
    kept = kept_by(stored_config)
    check_states(bool(kept and kept.states), "torch", folder)
    packed = {"quantization_config": Mxfp4Config(dequantize=True)} if packing_of(stored_config) else {}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        parameters = _check_scale(config, shapes, folder).num_parameters()
        stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
        dtype, note = (stored, None) if as_stored else devices.weights_dtype(device, stored, parameters)
        model, found = _with_report(
            AutoModelForCausalLM,
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **packed,
        )
    except FerrumError:
        raise
    except Exception as error:  # the model classes raise what they like over a bad config
        raise _as_ours(folder, error) from error
    _check_complete(folder, found)
    return model, [note] if note else []


def _with_report(cls: Any, folder: Path | None, **settings: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and which weights transformers missed or could not use."""
    model, found = cls.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **settings
    )
    return model, found


def _check_scale(config: PreTrainedConfig, shapes: checkpoint.Shapes, where: Path) -> PreTrainedModel:
    """The model without memory; transformers would allocate what the weights lack."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = sum(part.numel() for parts in (model.parameters(), model.buffers()) for part in parts)
    packed = 8 if getattr(config, "quantization_config", None) else 1  # 4-bit codes, eight in a stored value
    checkpoint.check_scale(values // packed, shapes, where)
    return model


def _as_ours(folder: Path, error: Exception) -> ModelFileError | UnsupportedModelError:
    reason = one_line(error)
    if "trust_remote_code" in reason or "custom code" in reason:
        return UnsupportedModelError(
            f"{folder} brings its own model code, which is never run", next_step="choose another model"
        )
    unknown = ("does not recognize this architecture", "Unrecognized", "quantiz")
    if isinstance(error, ImportError) or any(words in reason for words in unknown):
        return UnsupportedModelError(f"{folder}: {reason}", "see transformers' list of causal models")
    return ModelFileError(f"{folder} cannot be loaded: {reason}", next_step="get the model again")


def _check_complete(where: Path, found: dict[str, Any]) -> None:
    """transformers fills in random numbers for what is missing."""
    for kind, words in (("missing_keys", "Missing"), ("mismatched_keys", "Other shapes in")):
        if keys := sorted(map(str, found[kind])):
            raise ModelFileError(
                f"{where} does not fit its config: {words} {len(keys)} weights, such as {keys[0]}",
                next_step="get the model again",
            )


class StoredGGUF:
    """A GGUF's weights as the file has them, by the model's names for them (weights.Stored)."""

    def __init__(self, gguf: GGUFWeights) -> None:
        self._gguf = gguf
        self._names = set(self._gguf.names)

    def codes(self, name: str) -> QuantizedTensor | None:
        return self._gguf.read_quantized(name) if name in self._names else None

    def values(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._gguf.read(name))


def stored_weights(resolved: ResolvedModel) -> StoredGGUF | None:
    """None of a folder, whose weights are in the model as they are stored."""
    return StoredGGUF(GGUFWeights(resolved.gguf)) if resolved.format == "gguf" else None


def _load_gguf(resolved: ResolvedModel, device: Device, unread: bool) -> PreTrainedModel:
    """Unpacked exactly; a GPU then rounds to its dtype."""
    gguf = GGUFWeights(resolved.gguf)
    settings = dict(gguf.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    skeleton = _check_scale(config, gguf.shapes, resolved.path)
    linear = {f"{name}.weight" for name, module in skeleton.named_modules() if type(module) is nn.Linear}
    later = linear.intersection(gguf.names) if unread else set()
    weights = {
        name: placeholder(gguf.shape_of(name)) if name in later else torch.from_numpy(gguf.read(name))
        for name in gguf.names
    }
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, found = _with_report(model_class, None, config=config, state_dict=weights, dtype=device.dtype)
    _check_complete(resolved.path, found)
    for name in later:  # a placeholder that transformers has copied is no longer told from a weight
        if not is_unread(parameter := model.get_parameter(name)):
            parameter.data = torch.from_numpy(gguf.read(name))
    return model
