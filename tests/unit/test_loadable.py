"""What the headers of a model's files tell before it is loaded, in a process without any array library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrum_mlx import loadable
from ferrum_mlx.errors import FerrumError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ferrum_mlx.loadable import check_loadable

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
HEAVY = ("mlx", "mlx_lm", "torch", "transformers")


def folder_of(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros((64, 64), np.float32)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("backend", "changes", "error", "said"),
    [
        ("mlx", {}, None, ""),
        ("torch", {}, None, ""),
        ("mlx", {"model_type": "mistral"}, None, ""),  # mlx-lm takes another's class for it
        ("mlx", {"quantization": {"bits": 4}}, None, ""),
        ("torch", {"quantization": {"bits": 4}}, UnsupportedModelError, "packed for MLX"),
        ("mlx", {"model_type": "nosuch"}, UnsupportedModelError, "mlx_lm does not know"),
        ("torch", {"model_type": "nosuch"}, UnsupportedModelError, "transformers does not know"),
        ("mlx", {"model_type": None}, ModelFileError, "names no model_type"),
        ("mlx", {"model_file": "own.py"}, UnsupportedModelError, "its own model code"),
        ("torch", {"hidden_size": 65}, ModelFileError, "no tensor of the weights has it"),
    ],
)
def test_a_folder(
    backend: str, changes: dict[str, Any], error: type[FerrumError] | None, said: str, tmp_path: Path
) -> None:
    name = folder_of(tmp_path, **changes)
    if error is None:
        check_loadable(name, backend)
        return
    with pytest.raises(error, match=said):
        check_loadable(name, backend)


@pytest.mark.parametrize(
    ("metadata", "error", "said"),
    [
        ({}, None, ""),
        ({"general.architecture": "nosuch"}, UnsupportedModelError, "nosuch"),
        ({"llama.block_count": 50}, ModelFileError, "50"),
    ],
)
def test_a_gguf(
    metadata: dict[str, Any],
    error: type[FerrumError] | None,
    said: str,
    tmp_path: Path,
    write_gguf: Callable[..., Any],
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    if error is None:
        check_loadable(str(tmp_path / "m.gguf"), "mlx")
        return
    with pytest.raises(error, match=said):
        check_loadable(str(tmp_path / "m.gguf"), "mlx")


def test_what_is_not_here_is_not_fetched(fake_hub: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        check_loadable(fake_hub.REPO, "mlx")
    assert fake_hub.requests == []


def test_every_model_type_of_mlx_lm_is_known() -> None:
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    kinds = {file.stem for file in (Path(mlx_lm.__file__).parent / "models").glob("*.py")}
    assert kinds >= {"llama", "qwen3"}
    refused = [kind for kind in kinds | set(mlx_lm.MODEL_REMAPPING) if not loadable._may_know("mlx_lm", kind)]
    assert refused == []


def test_every_model_type_of_transformers_is_known() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert "qwen3" in auto.CONFIG_MAPPING_NAMES
    refused = [kind for kind in auto.CONFIG_MAPPING_NAMES if not loadable._may_know("transformers", kind)]
    assert refused == []


def test_no_array_library_is_loaded(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "m.gguf")
    checks = [f"check_loadable({folder_of(tmp_path)!r}, {backend!r})" for backend in ("mlx", "torch")]
    program = "; ".join([
        "import sys; from ferrum_mlx.loadable import check_loadable",
        *checks,
        f"check_loadable({str(tmp_path / 'm.gguf')!r}, 'mlx')",
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
    ])  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
