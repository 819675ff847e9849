from __future__ import annotations

import pytest

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.kv.manager import KVGroup
from ferrum_mlx.kv.sizing import plan_pool

GROUPS = [KVGroup((0, 1), None, 64), KVGroup((2,), 8, 36)]  # 100 bytes a token
CONFIG = EngineConfig(block_size=10)  # 1,000 bytes a block


def test_four_contexts_when_memory_is_plenty() -> None:
    plan = plan_pool(GROUPS, CONFIG, max_model_len=95, free_memory=10**9)
    assert (plan.num_blocks, plan.notes) == (38, ())


def test_half_of_what_is_free_when_it_is_not() -> None:
    plan = plan_pool(GROUPS, CONFIG, max_model_len=1000, free_memory=44_000)
    assert plan.num_blocks == 21  # 22 blocks' worth, one of them the null block
    assert "210 tokens" in plan.notes[0]


def test_kv_memory_decides_alone() -> None:
    config = EngineConfig(block_size=10, kv_memory=101_000)
    assert plan_pool(GROUPS, config, max_model_len=95, free_memory=0).num_blocks == 100


def test_too_little_is_one_clear_line() -> None:
    config = EngineConfig(block_size=10, kv_memory=1999)
    with pytest.raises(UsageError, match=r"1,999 bytes; allowed: at least 2,000 .*--kv-memory"):
        plan_pool(GROUPS, config, max_model_len=95, free_memory=10**9)
