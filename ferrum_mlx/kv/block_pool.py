"""The blocks of one pool, as integers with reference counts. Knows nothing of requests or arrays.

A block is in one of four states:

    blank      no reference, no key: anyone's
    cached     no reference, a key: findable by that key, and free for anyone when blank ones run out
    used       one reference; with a key it is findable, and then nobody writes to it any more
    shared     several references, each a sequence that found it by its key
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ferrum_mlx.errors import CapacityError, ContractError
from ferrum_mlx.kv.prefix import BlockKey
from ferrum_mlx.metrics import CACHED, FREE

NULL_BLOCK = 0  # never allocated: stands for "a window has left this", and takes padding writes


class BlockPool:
    """`num_blocks` allocatable blocks with ids 1 … num_blocks; block 0 is the null block.

    Blank blocks are given out first in, first out, except that a table may ask for the block after its
    last one: a sequence alone then owns consecutive blocks, which a backend reads as a slice. Then
    cached ones go, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self.num_shared = 0
        # Ordered sets: a plain dict would look for its first key past all those deleted before.
        self._blank = OrderedDict[int, None].fromkeys(range(1, num_blocks + 1))
        self._cached = OrderedDict[int, None]()  # least recently used first
        self._references: dict[int, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        """Cached blocks that nobody uses."""
        return len(self._cached)

    @property
    def num_keys(self) -> int:
        """Blocks that can be found, used or not."""
        return len(self._keys)

    def references(self, block: int) -> int:
        return self._references.get(block, 0)

    def allocate(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Take `count` blocks, consecutive ones behind block `after` where those are blank.

        Raises:
            CapacityError: fewer than `count` are free; nothing was taken.
        """
        if count > self.num_free:
            raise CapacityError(count, self.num_free)
        taken: list[int] = []
        while len(taken) < count and self._blank:
            block = after + 1 if after and after + 1 in self._blank else next(iter(self._blank))
            del self._blank[block]
            taken.append(block)
            after = block
        evicted = [self._evict() for _ in range(count - len(taken))]
        taken += sorted(evicted)  # freed from their ends: ascending again, neighbours stay neighbours
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give back a reference on each; null blocks are passed over.

        Raises:
            ContractError: a block that is not in use.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            references = self._references.get(block, 0)
            if not references:
                raise ContractError(f"KV block {block} is freed but not in use")
            if references > 1:
                self._references[block] = references - 1
                self.num_shared -= references == 2
                continue
            del self._references[block]
            (self._cached if block in self._keys else self._blank)[block] = None

    # Findable blocks

    def find(self, key: BlockKey) -> int | None:
        """The block with these very tokens behind that very parent; an equal digest is not enough."""
        block = self._by_digest.get(key.digest)
        return block if block is not None and self._keys[block].content == key.content else None

    def share(self, block: int) -> None:
        """Take a further reference on a block that was found."""
        references = self._references.get(block, 0)
        if not references:
            del self._cached[block]
        self.num_shared += references == 1
        self._references[block] = references + 1

    def is_cached(self, block: int) -> bool:
        """Nobody uses it, so that sharing it takes it out of the free ones."""
        return block in self._cached

    def register(self, block: int, key: BlockKey) -> None:
        """Make a used block findable, unless another one with its digest is already."""
        if key.digest not in self._by_digest and block not in self._keys:
            self._keys[block] = key
            self._by_digest[key.digest] = block

    def forget(self, block: int) -> None:
        """Make a block unfindable, so that it may be written to again; a cached one becomes blank."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_digest[key.digest]
        if block in self._cached:
            del self._cached[block]
            self._blank[block] = None

    def forget_all(self) -> None:
        for block in list(self._keys):
            self.forget(block)

    def states(self) -> tuple[int, ...]:
        """FREE, CACHED or the number of references of blocks 1 … num_blocks."""
        references, cached = self._references, self._cached
        return tuple(
            references.get(block) or (CACHED if block in cached else FREE)
            for block in range(1, self.num_blocks + 1)
        )

    def _evict(self) -> int:
        block = next(iter(self._cached))
        self.forget(block)
        del self._blank[block]
        self.evictions += 1
        return block
