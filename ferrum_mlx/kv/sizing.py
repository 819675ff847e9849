"""How many blocks the KV pools get: from measured free memory, never from the declared context alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.kv.manager import KVGroup

CONTEXTS = 4  # sequences of full length that the default pool holds


@dataclass(frozen=True, slots=True)
class PoolPlan:
    num_blocks: int  # in each group's pool
    notes: tuple[str, ...]


def plan_pool(
    groups: Sequence[KVGroup], config: EngineConfig, max_model_len: int, free_memory: int
) -> PoolPlan:
    """min(half of `free_memory`, CONTEXTS × max_model_len tokens), or what config.kv_memory buys.

    Args:
        free_memory: bytes free now, the weights being loaded.

    Raises:
        UsageError: less than one block fits.
    """
    block_bytes = sum(group.bytes_per_token for group in groups) * config.block_size
    wanted = -(-CONTEXTS * max_model_len // config.block_size)
    budget = config.kv_memory if config.kv_memory is not None else free_memory // 2
    affordable = budget // block_bytes - 1  # one block a pool is the null block
    num_blocks = affordable if config.kv_memory is not None else min(wanted, affordable)
    if num_blocks < 1:
        raise UsageError(
            f"the KV pool gets {budget:,} bytes",
            f"allowed: at least {2 * block_bytes:,} for this model",
            "raise --kv-memory, free memory, or take a smaller model",
        )
    tokens = num_blocks * config.block_size
    if tokens >= max_model_len:
        return PoolPlan(num_blocks, ())
    return PoolPlan(
        num_blocks, (f"the KV pool holds {tokens:,} tokens, fewer than the context of {max_model_len:,}",)
    )
