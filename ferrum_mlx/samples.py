"""A prompt that was asked for as the ordinary requests that an engine takes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

from ferrum_mlx.messages import ChatOptions, Prompt, Submit
from ferrum_mlx.plain import wholes
from ferrum_mlx.sampling import SamplingParams


def sample_ids(request_id: str, samples: int) -> list[str]:
    return [request_id] if samples == 1 else [f"{request_id}.{i}" for i in range(samples)]


def samples(
    request_id: str, prompt: Prompt, params: SamplingParams, chat: ChatOptions, adapter: str = ""
) -> Iterator[Submit]:
    """An ordinary request a sample: they differ in their noise, and the first one alone scores the prompt."""
    if params.n == 1:
        yield Submit(request_id, prompt, params, chat, params.priority, adapter=adapter)
        return
    seed = secrets.randbits(63) if params.seed is None else params.seed
    first = replace(params, n=1, seed=seed)
    rest = replace(first, prompt_logprobs=None)
    for i, name in enumerate(sample_ids(request_id, params.n)):
        yield Submit(name, prompt, rest if i else first, chat, params.priority, i, adapter)


def own(prompt: Prompt) -> Prompt:
    """For the engine alone: it reads a prompt later, and who asks may go on with the conversation."""
    if not isinstance(prompt, list):
        return prompt
    if (ids := wholes(prompt)) is not None:
        return ids
    messages = [dict(part) for part in prompt if isinstance(part, dict)]
    return messages if len(messages) == len(prompt) else prompt
