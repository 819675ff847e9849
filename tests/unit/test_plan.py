"""The line that says what was chosen at load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.model_info import MemoryRequirements
from ferrum_mlx.plan import plan


def executor(context: int = 4096, own: int = 8192, *, tokens: int = 16384, **info: Any) -> Any:
    facts = {"dtype": "float32", "quantization": "none", "kv_dtype": "", "max_sequence_length": own, **info}
    memory = MemoryRequirements(
        parameter_bytes=538_000_000,
        kv_bytes_per_token=46_080,
        kv_pool_bytes=46_080 * tokens,
        kv_tokens=tokens,
    )
    return SimpleNamespace(
        info=SimpleNamespace(**facts),
        capabilities=lambda: SimpleNamespace(max_sequence_length=context),
        memory=lambda: memory,
    )


@pytest.mark.parametrize(
    ("asked", "context", "own", "said"),
    [
        (None, 4096, 9000, "context 4,096 of 9,000 tokens, --max-model-len takes more · "),
        (4096, 4096, 9000, "context 4,096 of 9,000 tokens · "),  # the user's own wish
        (None, 4096, 4096, "context 4,096 tokens · "),
        (None, 2048, 2048, "context 2,048 tokens · "),
        (None, 4096, 0, "context 4,096 tokens · "),  # the model names no limit
        (None, 1024, 9000, "context 1,024 of 9,000 tokens · "),  # by another bound, said where it is found
    ],
)
def test_a_context_that_the_model_would_not_end_is_said(
    asked: int | None, context: int, own: int, said: str
) -> None:
    assert plan(EngineConfig(max_model_len=asked), executor(context, own)).startswith(said)


def test_the_whole_line() -> None:
    assert plan(EngineConfig(), executor()) == (
        "context 4,096 of 8,192 tokens, --max-model-len takes more · "
        "KV pool 755 MB (float32, 46.1 kB a token, 16,384 tokens) · weights 538 MB float32"
    )


def test_quantized_kv_and_packed_weights_have_their_names() -> None:
    line = plan(EngineConfig(), executor(tokens=100_000, kv_dtype="int8", quantization="int4 (9 layers)"))
    assert "KV pool 4.6 GB (int8, 46.1 kB a token, 100,000 tokens)" in line
    assert line.endswith("weights 538 MB packed")


def test_a_pool_is_not_a_thousand_megabytes() -> None:
    assert "KV pool 1.0 GB (" in plan(EngineConfig(), executor(tokens=21_695))  # 999.7 MB


def test_a_pool_that_windows_alone_bound_names_no_tokens() -> None:
    assert "(float32, 46.1 kB a token)" in plan(EngineConfig(), executor(tokens=0))
