"""How many blocks the KV pools get: from measured free memory, never from the declared context alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.kv.sequence import KVGroup

CONTEXTS = 4  # sequences of full length that the default pool holds
LEAST_STATES = 3  # the load-time check runs two sequences; a third slot can keep a snapshot
LEAST_TOKENS = 16  # a pool below this, or below two blocks, cannot hold the load-time check's sequences


@dataclass(frozen=True, slots=True)
class PoolPlan:
    num_blocks: tuple[int, ...]  # of each group's pool
    num_states: int  # slots for the state of recurrent layers, snapshots included
    notes: tuple[str, ...]


def plan_pools(
    groups: Sequence[KVGroup],
    config: EngineConfig,
    max_model_len: int,
    free_memory: int,
    state_bytes: int = 0,
    *,
    share: float = 1.0,
) -> PoolPlan:
    """Room for min(half of `free_memory`, CONTEXTS × max_model_len tokens), or for config.kv_memory.

    Every group's pool holds as many tokens as the others, except that a window group's gets no more
    than its windows can ever fill; what that saves goes to the others. States of recurrent layers get a
    slot for each sequence that may run and as many for snapshots, but at most half of the bytes.

    Args:
        state_bytes: of one sequence's recurrent layers; 0 where there are none.
        free_memory: bytes free now, the weights being loaded.
        share: of all those bytes; another model's pools get the rest.

    Raises:
        UsageError: more is asked for than is free, or less than LEAST_TOKENS fit.
    """
    if config.kv_memory is not None and config.kv_memory > free_memory:
        raise UsageError(
            f"--kv-memory is {config.kv_memory:,} bytes",
            f"allowed: at most {free_memory:,}, what is free now",
            "lower it, leave it away, or take a smaller model",
        )
    budget = int(share * (free_memory // 2 if config.kv_memory is None else config.kv_memory))
    num_states = _num_states(state_bytes, config, budget // 2 if groups else budget)
    if not groups:
        return PoolPlan((), num_states, ())
    budget -= num_states * state_bytes
    block_bytes = [group.bytes_per_token * config.block_size for group in groups]
    caps = [_most_blocks(group, config, max_model_len) for group in groups]
    blocks = _split(budget - sum(block_bytes), block_bytes, caps)  # every pool has a null block besides
    least_blocks = max(2, -(-LEAST_TOKENS // config.block_size))
    if min(blocks) < least_blocks:
        least = sum(block_bytes) * (1 + least_blocks)
        raise UsageError(
            f"the KV pool gets {budget:,} bytes",
            f"allowed: at least {least:,} for this model",
            "raise --kv-memory, free memory, or take a smaller model",
        )
    held = min(
        (n for n, group in zip(blocks, groups, strict=True) if group.window is None), default=min(blocks)
    )
    if held * config.block_size >= max_model_len:
        return PoolPlan(tuple(blocks), num_states, ())
    note = (
        f"the KV pool holds {held * config.block_size:,} tokens, fewer than the context of {max_model_len:,}"
        f"; --kv-memory gives it more memory{'' if config.kv_bits else ', --kv-bits 8 makes a token smaller'}"
    )
    return PoolPlan(tuple(blocks), num_states, (note,))


def _num_states(state_bytes: int, config: EngineConfig, budget: int) -> int:
    if not state_bytes:
        return 0
    num_states = min(max(2 * config.max_num_seqs, LEAST_STATES), budget // state_bytes)
    if num_states < LEAST_STATES:
        raise UsageError(
            f"the recurrent layers' states get {budget:,} bytes",
            f"allowed: at least {LEAST_STATES * state_bytes:,} for this model",
            "raise --kv-memory, free memory, or take a smaller model",
        )
    return num_states


def _most_blocks(group: KVGroup, config: EngineConfig, max_model_len: int) -> int | None:
    """More blocks than this a pool could never use, or is not wanted to by default; None: no limit."""
    wanted = -(-CONTEXTS * max_model_len // config.block_size) if config.kv_memory is None else None
    if group.window is None:
        return wanted
    a_sequence = group.window_blocks(config.block_size)
    in_windows = config.max_num_seqs * a_sequence + -(-config.max_num_batched_tokens // config.block_size)
    return in_windows if wanted is None else min(wanted, in_windows)


def _split(budget: int, block_bytes: Sequence[int], caps: Sequence[int | None]) -> list[int]:
    """Equal numbers of blocks within `budget` bytes, except that nobody gets more than their cap."""
    blocks = [0] * len(block_bytes)
    open_groups = set(range(len(block_bytes)))
    while open_groups:
        share = max(0, budget // sum(block_bytes[i] for i in open_groups))
        capped = {i for i in open_groups if (cap := caps[i]) is not None and cap <= share}
        for i in capped or open_groups:
            blocks[i] = min(share, caps[i] or share)
            budget -= blocks[i] * block_bytes[i]
        open_groups = open_groups - capped if capped else set()
    return blocks
