from __future__ import annotations

import pytest

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.kv.sequence import KVGroup
from ferrum_mlx.kv.sizing import plan_pools

GROUPS = [KVGroup((0, 1), None, 64), KVGroup((2,), 8, 36)]  # 100 bytes a token
CONFIG = EngineConfig(block_size=10)  # 1,000 bytes a block


def test_four_contexts_when_memory_is_plenty() -> None:
    plan = plan_pools(GROUPS, CONFIG, max_model_len=95, free_memory=10**9)
    assert (plan.num_blocks, plan.notes) == ((38, 38), ())


def test_half_of_what_is_free_when_it_is_not() -> None:
    plan = plan_pools(GROUPS, CONFIG, max_model_len=1000, free_memory=44_000)
    assert plan.num_blocks == (21, 21)  # 22 blocks' worth, one of them the null block
    assert "210 tokens" in plan.notes[0]
    assert plan.notes[0].endswith("; --kv-memory gives it more memory, --kv-bits 8 makes a token smaller")


def test_a_window_pool_gets_what_its_windows_can_fill_and_the_others_the_rest() -> None:
    config = EngineConfig(block_size=10, max_num_seqs=2, max_num_batched_tokens=20)
    plan = plan_pools(GROUPS, config, max_model_len=10_000, free_memory=440_000)
    # two sequences of at most 2 blocks in a window of 8, and 2 blocks of a step
    assert plan.num_blocks[1] == 6
    assert plan.num_blocks[0] == (220_000 - 1000 - 6 * 360) // 640
    assert sum(n * size for n, size in zip(plan.num_blocks, (640, 360), strict=True)) <= 219_000


def test_kv_memory_decides_alone() -> None:
    config = EngineConfig(block_size=10, kv_memory=101_000)
    assert plan_pools(GROUPS[:1], config, max_model_len=95, free_memory=10**6).num_blocks == (156,)


@pytest.mark.parametrize(
    ("kv_memory", "free", "message"),
    [
        (2999, 10**9, r"2,999 bytes; allowed: at least 3,000 .*--kv-memory"),
        (1, 10**9, r"at least 3,000"),
        (10**6, 10**5, r"--kv-memory is 1,000,000 bytes; allowed: at most 100,000"),
    ],
)
def test_too_little_and_too_much_are_one_clear_line(kv_memory: int, free: int, message: str) -> None:
    config = EngineConfig(block_size=10, kv_memory=kv_memory)
    with pytest.raises(UsageError, match=message):
        plan_pools(GROUPS, config, max_model_len=95, free_memory=free)


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_the_least_that_is_named_is_enough(block_size: int) -> None:
    with pytest.raises(UsageError) as error:
        plan_pools(
            GROUPS, EngineConfig(block_size=block_size, kv_memory=1), max_model_len=95, free_memory=10**9
        )
    least = int(error.value.allowed.split()[3].replace(",", ""))
    config = EngineConfig(block_size=block_size, kv_memory=least)
    blocks = min(plan_pools(GROUPS, config, max_model_len=95, free_memory=10**9).num_blocks)
    assert blocks >= -(-7 // block_size) + -(-3 // block_size)  # the load-time check's two prompts
