"""The blocks of one KV pool, as integers. Knows nothing of tokens, requests or arrays."""

from __future__ import annotations

from collections.abc import Iterable

from ferrum_mlx.errors import CapacityError, ContractError

NULL_BLOCK = 0  # never allocated: stands for "a window has left this", and takes padding writes


class BlockPool:
    """`num_blocks` allocatable blocks with ids 1 … num_blocks; block 0 is the null block.

    The free queue is first in, first out, except that a table may ask for the block after its last
    one: a sequence alone then owns consecutive blocks, which a backend reads as a slice.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: dict[int, None] = dict.fromkeys(range(1, num_blocks + 1))  # ordered set
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Take `count` blocks, consecutive ones behind block `after` where those are free.

        Raises:
            CapacityError: fewer than `count` are free; nothing was taken.
        """
        if count > self.num_free:
            raise CapacityError(count, self.num_free)
        taken: list[int] = []
        for _ in range(count):
            block = after + 1 if after and after + 1 in self._free else next(iter(self._free))
            del self._free[block]
            taken.append(block)
            after = block
        self._used.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; null blocks are passed over.

        Raises:
            ContractError: a block that is not in use.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if block not in self._used:
                raise ContractError(f"KV block {block} is freed but not in use")
            self._used.remove(block)
            self._free[block] = None
