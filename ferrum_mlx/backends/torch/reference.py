"""transformers' own generate over an executor's model: what `verify` compares with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.executor import ModelExecutor


def generate(executor: ModelExecutor, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """`count` greedy ids on transformers' caches, and the logits behind each, [count, vocab] float32."""
    assert isinstance(executor, TorchExecutor)
    with executor.library_model() as model:
        ids = torch.tensor([list(prompt)], device=model.device)
        config = model.generation_config
        ends, config.eos_token_id = config.eos_token_id, None  # go on past the end
        try:
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # without it, ids equal to the pad id would be hidden
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        finally:
            config.eos_token_id = ends
    rows: np.ndarray = torch.cat(made.logits).float().cpu().numpy()
    return made.sequences[0, len(prompt) :].tolist(), rows
