"""Random LoRA adapters, written as PEFT and as mlx-lm write them, and what they add to the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 4
Deltas = dict[str, np.ndarray]  # module path → [out, in]


def _parts(sizes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [rank, in] and B [out, rank] for each module of (in, out)."""
    rng = np.random.default_rng(seed)
    return {
        path: (
            rng.standard_normal((RANK, size[0])).astype(np.float32) / np.float32(np.sqrt(size[0])),
            rng.standard_normal((size[1], RANK)).astype(np.float32),
        )
        for path, size in sizes.items()
    }


def _write(folder: Path, file: str, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / file)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_peft(
    folder: Path, sizes: Mapping[str, tuple[int, int]], seed: int, alpha: float = 2.0, **config: Any
) -> Deltas:
    """Every module's name is a target, so that all of them must be there."""
    tensors: dict[str, np.ndarray] = {}
    parts = _parts(sizes, seed)
    for path, (a, b) in parts.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": alpha,
        "target_modules": sorted({path.rpartition(".")[2] for path in sizes}),
        "bias": "none",
        "megatron_core": "megatron.core",
        "init_lora_weights": True,
        "base_model_name_or_path": "hub/llama",
    }
    _write(folder, "adapter_model.safetensors", tensors, settings | config)
    scale = np.float32(alpha / (np.sqrt(RANK) if config.get("use_rslora") else RANK))
    return {path: scale * (b @ a) for path, (a, b) in parts.items()}


def write_mlx_lm(
    folder: Path, sizes: Mapping[str, tuple[int, int]], seed: int, scale: float = 0.5, **config: Any
) -> Deltas:
    """`sizes` must be all the Linear layers of the last layers that config says."""
    tensors: dict[str, np.ndarray] = {}
    parts = _parts(sizes, seed)
    for path, (a, b) in parts.items():
        tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"] = a.T, b.T
    settings = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": RANK, "scale": scale, "dropout": 0.0},
        "model": "llama",
    }
    _write(folder, "adapters.safetensors", tensors, settings | config)
    return {path: np.float32(scale) * (b @ a) for path, (a, b) in parts.items()}
