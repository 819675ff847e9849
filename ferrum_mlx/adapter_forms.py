"""What an adapter_config.json says, in the two forms there are: PEFT's and mlx-lm's.

PEFT's has dozens of switches, and gets more. A switch that is set and not known here to leave a plain
low-rank adapter as it is, is refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrum_mlx.checkpoint import read_json
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, shown

CONFIG = "adapter_config.json"
MOST_RANK = 4096
PLAIN = "allowed: plain low-rank changes of Linear layers (LoRA)"
_PEFT_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MLX_KEY = re.compile(r"(.+)\.lora_([ab])")
# PEFT's switches that say how an adapter was trained, or that are read below.
_HARMLESS = {
    *("peft_type", "task_type", "auto_mapping", "inference_mode", "peft_version", "revision"),
    *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # init_lora_weights says if they count
    *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_BASE_UNCHANGED = (True, False, None, "gaussian", "orthogonal", "eva")  # values of init_lora_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What tensors mean, and which there must be.

    Attributes:
        file: where they are.
        base: the model that the adapter was made for; "" if that is not said.
        by_rows: A is [rank, in] and B [out, rank], as PEFT has them; else both the other way round.
        key: of a tensor: the module's path, then A or B.
        targets: ends of the paths that are changed; None: not known.
        layers, last: which of the layers are, by number, or how many of the last ones; None: all.
    """

    file: Path
    base: str
    rank: int
    scale: float
    by_rows: bool
    key: re.Pattern[str]
    targets: frozenset[str] | None
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    last: int | None = None

    def wants(self, path: str, num_layers: int) -> bool:
        """Whether there must be tensors for a Linear layer of the model."""
        layer = layer_of(path)
        if layer is None or self.targets is None or not _ends(path, self.targets):
            return False
        if _ends(path, self.excluded) or (self.layers is not None and layer not in self.layers):
            return False
        return not self.last or layer >= num_layers - self.last


def layer_of(path: str) -> int | None:
    """Which of the model's layers a module is in."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def form_of(folder: Path) -> Form:
    """Of an adapter's folder.

    Raises:
        ModelFileError: no adapter is there, or its configuration makes no sense.
        UnsupportedModelError: it is more than a low-rank change of Linear layers.
    """
    where = folder / CONFIG
    if not where.is_file():
        raise ModelFileError(
            f"{folder} has no {CONFIG}", next_step="give the folder that PEFT or mlx-lm saved an adapter in"
        )
    config = read_json(where)
    if "peft_type" in config:
        return _peft(folder, config)
    if "lora_parameters" in config or "fine_tune_type" in config:
        return _mlx_lm(folder, config)
    raise ModelFileError(f"{where} is no configuration of a LoRA adapter", "allowed: PEFT's or mlx-lm's")


def _peft(folder: Path, config: dict[str, Any]) -> Form:
    where = folder / CONFIG
    if config["peft_type"] != "LORA":
        raise _refused(where, "peft_type", config["peft_type"])
    if config.get("bias", "none") != "none":
        raise _refused(where, "bias", config["bias"])
    if config.get("init_lora_weights") not in _BASE_UNCHANGED:  # such a start changes the base model, too
        raise _refused(where, "init_lora_weights", config["init_lora_weights"])
    for name, value in config.items():
        if value and name not in (*_HARMLESS, "bias", "init_lora_weights"):
            raise _refused(where, name, value)
    rank = _rank(where, "r", config.get("r"))
    alpha = _number(where, "lora_alpha", config.get("lora_alpha"))
    if (folder / "adapter_model.bin").exists() and not (folder / "adapter_model.safetensors").exists():
        raise UnsupportedModelError(
            f"{folder / 'adapter_model.bin'} is a pickle, which may run a program",
            "allowed: adapter_model.safetensors",
            "save the adapter again with PEFT's save_pretrained",
        )
    layers = _listed(config.get("layers_to_transform"))
    if not all(isinstance(layer, int) for layer in layers):
        raise _unfit(where, "layers_to_transform", layers, "numbers of layers")
    return Form(
        file=folder / "adapter_model.safetensors",
        base=_text(config.get("base_model_name_or_path")),
        rank=rank,
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        by_rows=True,
        key=_PEFT_KEY,
        targets=_texts(config.get("target_modules")),
        excluded=_texts(config.get("exclude_modules")) or frozenset(),
        layers=frozenset(layers) or None,
    )


def _mlx_lm(folder: Path, config: dict[str, Any]) -> Form:
    where = folder / CONFIG
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise _refused(where, "fine_tune_type", kind)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise _unfit(where, "lora_parameters", parameters, "an object with rank and scale")
    last = config.get("num_layers")
    if isinstance(last, bool) or not isinstance(last, int):
        raise _unfit(where, "num_layers", last, "a whole number")
    keys = parameters.get("keys")
    return Form(
        file=folder / "adapters.safetensors",
        base=_text(config.get("model")),
        rank=_rank(where, "rank", parameters.get("rank")),
        scale=_number(where, "scale", parameters.get("scale")),
        by_rows=False,
        key=_MLX_KEY,
        targets=frozenset([""]) if keys is None else _texts(keys),
        last=max(last, 0),  # 0 and below: all of them
    )


def _ends(path: str, targets: frozenset[str]) -> bool:
    """Whether a path is one of the targets, or ends with one; "" is every path's end."""
    parts = path.split(".")  # a stranger may name a million targets, a path has a few ends
    return "" in targets or any(".".join(parts[i:]) in targets for i in range(len(parts)))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _texts(value: object) -> frozenset[str] | None:
    """A list of names; None for anything else, such as a pattern."""
    return frozenset(map(str, value)) if isinstance(value, list) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _rank(where: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANK:
        raise _unfit(where, key, value, f"a whole number from 1 to {MOST_RANK}")
    return value


def _number(where: Path, key: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e6:  # refuses NaN
        raise _unfit(where, key, value, "a number below a million")
    return float(value)


def _refused(where: Path, key: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: {key} is {shown(value)}", PLAIN, "merge the adapter into its model, and load that"
    )


def _unfit(where: Path, key: str, value: object, allowed: str) -> ModelFileError:
    return ModelFileError(
        f"{where}: {key} is {shown(value)}", f"allowed: {allowed}", "save the adapter again"
    )
