"""The executors that the contract suite runs over: every backend, tiny and quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.model_info import ModelInfo

from ..metal_shim.shim import any_kernel, needs_kernels

if TYPE_CHECKING:
    from ferrum_mlx.backends.torch.executor import TorchExecutor

WITH_ADAPTERS = "those with rows of an adapter run as they are"
Build = Callable[..., PagedExecutor]


def tiny_config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
    }
    return EngineConfig(**(defaults | settings))


def _fake(config: EngineConfig, blocks: int) -> PagedExecutor:
    return FakeExecutor(replace(config, kv_memory=blocks * config.block_size * 4))


def _info() -> ModelInfo:
    return ModelInfo(
        model_id="tiny",
        model_type="llama",
        num_parameters=0,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=258,
        max_sequence_length=2048,
        dtype="float32",
        device="cpu",
    )


def _mlx(config: EngineConfig, blocks: int, *, host: bool) -> PagedExecutor:
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    from ferrum_mlx.backends.mlx.executor import MLXExecutor

    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    mx.random.seed(1)
    args = ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        vocab_size=258,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Model(args)
    model.apply(lambda array: array * 3)  # larger logits than a fresh model's: greedy ids that vary
    block_bytes = 2 * 2 * 2 * 8 * 4 * config.block_size  # K and V, layers, kv_heads, head_dim, float32
    sized = replace(config, kv_memory=(blocks + 1) * block_bytes)
    return MLXExecutor(model, _info(), sized, host=host, free_memory=2**30)


def _torch(config: EngineConfig, blocks: int, device: str = "cpu") -> TorchExecutor:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ferrum_mlx.backends.torch.executor import TorchExecutor

    torch.manual_seed(2)
    model_config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        vocab_size=258,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,  # larger logits than a fresh model's: greedy ids that vary
    )
    block_bytes = 2 * 2 * 2 * 8 * 4 * config.block_size  # K and V, layers, kv_heads, head_dim, float32
    sized = replace(config, kv_memory=(blocks + 1) * block_bytes)
    model = LlamaForCausalLM(model_config).eval().to(device)
    return TorchExecutor(model, _info(), sized, free_memory=2**30)


BACKENDS = {
    "fake": _fake,
    "mlx": lambda config, blocks: _mlx(config, blocks, host=False),
    "mlx-host": lambda config, blocks: _mlx(config, blocks, host=True),
}
if find_spec("torch"):  # else test_torch_only.py is skipped, and says why
    import torch

    BACKENDS["torch"] = _torch
    BACKENDS["torch-plain"] = _torch  # without the kernel, as where numba is not installed
    BACKENDS["torch-captured"] = _torch
    if torch.cuda.is_available():
        BACKENDS["torch-cuda"] = lambda config, blocks: _torch(config, blocks, "cuda")


def _capture(executor: TorchExecutor) -> None:
    """Decode steps as on CUDA: through block tables, captured and replayed."""
    from ferrum_mlx.backends.torch.tables import attend

    from .tape import TapeCapture

    executor.speed_up(lambda: attend, TapeCapture())
    off = executor.capabilities().off
    assert off == ((f"captured decode steps: {WITH_ADAPTERS}",) if executor.adapter_names else ())
    executor.kv.forget_prefixes()  # the checks' own prompts


def _through_the_kernel(executor: PagedExecutor) -> None:
    """Decode and verify rows as on Metal."""
    from ferrum_mlx.backends.mlx.executor import MLXExecutor
    from ferrum_mlx.backends.mlx.kernels.launch import MetalAttention

    assert isinstance(executor, MLXExecutor)
    executor.speed_up(lambda: MetalAttention(any_kernel))
    assert executor.capabilities().off == ()
    executor.kv.forget_prefixes()  # the checks' own prompts


@pytest.fixture(params=[*BACKENDS, pytest.param("mlx-kernel", marks=[pytest.mark.slow, needs_kernels])])
def build(request: pytest.FixtureRequest) -> Build:
    """Makes an executor of the backend under test, with a pool of 40 blocks unless told otherwise."""

    def make(blocks: int = 40, **settings: Any) -> PagedExecutor:
        executor = BACKENDS[request.param.removesuffix("-kernel")](tiny_config(**settings), blocks)
        executor.prepare_startup()
        if request.param == "mlx-kernel":
            _through_the_kernel(executor)
        if request.param == "torch-plain":
            executor.slow_down(kernel=True)  # type: ignore[attr-defined]
        if request.param == "torch-captured":
            _capture(executor)
        return executor

    return make


@pytest.fixture
def executor(build: Build) -> PagedExecutor:
    return build()
