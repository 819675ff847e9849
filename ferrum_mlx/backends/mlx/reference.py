"""mlx-lm's own generate over an executor's model: what `verify` compares with."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.executor import ModelExecutor


def generate(executor: ModelExecutor, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """`count` greedy ids on mlx-lm's caches, and the logits behind each, [count, vocab] float32."""
    assert isinstance(executor, MLXExecutor)
    rows: list[mx.array] = []

    def keep(tokens: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits[0])
        return logits

    steps = generate_step(
        mx.array(list(prompt)),
        executor.model,
        max_tokens=count,
        logits_processors=[keep],
        prompt_cache=executor.native_caches(),
    )
    ids = [int(token) for token, _ in steps]
    return ids, np.array(mx.stack(rows[:count]).astype(mx.float32))  # it computes one more than it yields
