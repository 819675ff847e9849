"""The pair matrix on torch: every two features together give what a plain run gives, exact in float32.

Cases, runs and comparisons are those of the matrix over MLX; recurrent layers and KV in 4 bits are refused on
torch.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.backends.torch import zoo
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine

from . import pairs, test_pairs

NAMES = [name for name in pairs.FEATURES if name not in ("recurrent layers", "4-bit KV")]


def _build(model: str, settings: dict[str, Any]) -> Engine:
    defaults = {"numerics": "exact", "block_size": 4, "max_model_len": 400, "max_num_batched_tokens": 512}
    config = EngineConfig(**(defaults | settings))
    executor = TorchExecutor(zoo.build(model), zoo.info(model), config, free_memory=2**30)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="torch", backend_reason="a test")


@pytest.fixture(autouse=True, scope="module")
def _on_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "build", _build)
        patch.setattr(test_pairs, "build", _build)
        patch.setattr(test_pairs, "_plain", cache(test_pairs._plain.__wrapped__))
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("feature", NAMES)
def test_alone(feature: str) -> None:
    test_pairs.test_alone(feature, {})


@pytest.mark.parametrize(("one", "other"), pairs.all_pairs(NAMES))
def test_pair(one: str, other: str) -> None:
    test_pairs.test_pair(one, other, {})
