"""What was chosen at load, in one line: context, KV pool, weights; and which option takes more."""

from __future__ import annotations

from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.plain import size


def plan(config: EngineConfig, executor: ModelExecutor) -> str:
    return " · ".join((_context(config, executor), _pool(executor), _weights(executor)))


def _context(config: EngineConfig, executor: ModelExecutor) -> str:
    """With the option where our default, not the model, ends the context."""
    context, own = executor.capabilities().max_sequence_length, executor.info.max_sequence_length
    said = f"context {context:,} of {own:,} tokens" if context < own else f"context {context:,} tokens"
    if config.max_model_len is None and context == DEFAULT_CONTEXT < own:
        return f"{said}, --max-model-len takes more"
    return said


def _pool(executor: ModelExecutor) -> str:
    info, memory = executor.info, executor.memory()
    if not memory.kv_bytes_per_token:
        return f"states {size(memory.kv_pool_bytes)}"
    facts = [info.kv_dtype or info.dtype, f"{size(memory.kv_bytes_per_token)} a token"]
    if memory.kv_tokens:
        facts.append(f"{memory.kv_tokens:,} tokens")
    return f"KV pool {size(memory.kv_pool_bytes)} ({', '.join(facts)})"


def _weights(executor: ModelExecutor) -> str:
    kind = executor.info.dtype if executor.info.quantization == "none" else "packed"
    return f"weights {size(executor.memory().parameter_bytes)} {kind}"
