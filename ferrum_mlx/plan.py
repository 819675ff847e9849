"""What was chosen at load, in one line: context, KV pool, weights; and which option takes more."""

from __future__ import annotations

from collections.abc import Iterator

from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.plain import size


def plan(config: EngineConfig, executor: ModelExecutor) -> str:
    parts = _context(config, executor), *_kept(executor), _weights(executor)
    return " · ".join(parts)


def _context(config: EngineConfig, executor: ModelExecutor) -> str:
    """With the option where our default, not the model, ends the context."""
    context, own = executor.capabilities().max_sequence_length, executor.info.max_sequence_length
    said = f"context {context:,} of {own:,} tokens" if context < own else f"context {context:,} tokens"
    if config.max_model_len is None and context == DEFAULT_CONTEXT < own:
        return f"{said}, --max-model-len takes more"
    return said


def _kept(executor: ModelExecutor) -> Iterator[str]:
    """Of sequences: the pool of their keys and values, the slots of their states."""
    info, memory = executor.info, executor.memory()
    states = memory.state_slots * memory.state_bytes
    if memory.kv_bytes_per_token:
        facts = [info.kv_dtype or info.dtype, f"{size(memory.kv_bytes_per_token)} a token"]
        if memory.kv_tokens:
            facts.append(f"{memory.kv_tokens:,} tokens")
        yield f"KV pool {size(memory.kv_pool_bytes - states)} ({', '.join(facts)})"
    if states:
        each = f"{size(memory.state_bytes)} a request, {memory.state_slots} slots"
        yield f"recurrent states {size(states)} ({each})"


def _weights(executor: ModelExecutor) -> str:
    kind = executor.info.dtype if executor.info.quantization == "none" else "packed"
    return f"weights {size(executor.memory().parameter_bytes)} {kind}"
