from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.kv.block_pool import NULL_BLOCK, BlockPool


def test_a_lone_table_gets_consecutive_blocks_whatever_the_free_order() -> None:
    pool = BlockPool(8)
    scattered = pool.allocate(8)
    pool.free([scattered[i] for i in (4, 0, 6, 2, 7, 1, 5, 3)])
    table = pool.allocate(1)
    table += pool.allocate(3, after=table[-1])
    assert table == [5, 6, 7, 8]


def test_the_null_block_is_never_given_and_never_taken_back() -> None:
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.allocate(3)
    pool.free([NULL_BLOCK])
    assert pool.num_free == 0


def test_shortage_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(CapacityError):
        pool.allocate(2)
    assert (pool.num_free, pool.num_used) == (1, 2)


def test_double_free_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    for wrong in (block, 99):
        with pytest.raises(ContractError):
            pool.free([wrong])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_block_is_owned_twice_and_none_is_lost(moves: list[tuple[bool, int]]) -> None:
    pool = BlockPool(10)
    owned: list[list[int]] = []
    for take, n in moves:
        if take and n <= pool.num_free:
            owned.append(pool.allocate(n, after=owned[-1][-1] if owned and owned[-1] else NULL_BLOCK))
        elif owned:
            pool.free(owned.pop(n % len(owned)))
        blocks = [block for table in owned for block in table]
        assert len(set(blocks)) == len(blocks) == pool.num_used
        assert set(blocks) <= set(range(1, 11))
        assert pool.num_free + pool.num_used == 10
