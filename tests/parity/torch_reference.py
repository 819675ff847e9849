"""The other side of the comparison: transformers alone, with eager attention and its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from ferrum_mlx.backends.torch import zoo

from . import drive


@cache
def model(name: str) -> PreTrainedModel:
    """A copy that no executor has touched."""
    return zoo.build(name)


@cache
def ids(name: str) -> list[list[int]]:
    """Greedy ids of each prompt."""
    return [generate(model(name), prompt, drive.NEW_TOKENS) for prompt in drive.prompts()]


def generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by transformers; the mask keeps it from hiding ids that equal the pad id."""
    model.generation_config.eos_token_id = None  # an output cut short proves nothing
    given = torch.tensor([prompt])
    mask = torch.ones_like(given)
    known = model.generate(given, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return known[0, len(prompt) :].tolist()


def logits(name: str, known: Sequence[int]) -> np.ndarray:
    """[len(known), vocab]"""
    with torch.inference_mode():
        given = torch.tensor([list(known)])
        return model(name)(input_ids=given, attention_mask=torch.ones_like(given)).logits[0].numpy()
