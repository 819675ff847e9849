"""Which prompts can share computed blocks: keys given to full blocks, hits found, blocks awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens

from ferrum_mlx.kv.block_pool import NULL_BLOCK, BlockPool
from ferrum_mlx.kv.matching import longest_hit
from ferrum_mlx.kv.prefix import BlockKey, block_key, block_keys, root
from ferrum_mlx.kv.sequence import KVGroup, Sequence
from ferrum_mlx.kv.states import StateSlots


class PrefixCache:
    """The keys themselves lie in the pools, which evict them."""

    def __init__(
        self,
        groups: Tokens[KVGroup],
        pools: Tokens[BlockPool],
        states: StateSlots | None,
        block_size: int,
        *,
        enabled: bool,
        salt: Tokens[str],
    ) -> None:
        self.enabled = enabled
        self.hits = self.misses = self.saved_tokens = 0
        self.root = root(*salt)
        self._salt = tuple(salt)
        self._groups, self._pools, self._states = groups, pools, states
        self._block_size = block_size
        self._coming: Counter[bytes] = Counter()  # digests of blocks that running sequences will make

    def root_of(self, salt: Tokens[str] = ()) -> bytes:
        """The digest before the first block, for sequences that share this besides: an adapter's."""
        return root(*self._salt, *salt) if salt else self.root

    def keys(self, prompt: Tokens[int], salt: Tokens[str] = ()) -> list[BlockKey]:
        """Of the prompt's full blocks; empty when the cache is off."""
        return block_keys(self.root_of(salt), prompt, self._block_size) if self.enabled else []

    def find(self, keys: Tokens[BlockKey], prompt_len: int) -> int:
        """How many leading blocks of a prompt are there already; one token is always left to compute."""
        usable = keys[: (prompt_len - 1) // self._block_size]
        return longest_hit(usable, self._groups, self._pools, self._states, self._block_size)

    def is_coming(self, keys: Tokens[BlockKey], prompt_len: int, hit: int) -> bool:
        """Whether a running sequence is about to make a longer hit possible."""
        usable = min(len(keys), (prompt_len - 1) // self._block_size)
        behind = keys[hit : usable if self._states else min(hit + 1, usable)]
        return any(key.digest in self._coming for key in behind)

    def start(self, seq: Sequence, keys: Tokens[BlockKey], hit: int) -> None:
        """Count the hit or miss of a prompt that could have one, and announce the blocks it will compute.

        Of those, a recurrent layer's state is kept behind one alone; nobody gets on by the others.
        """
        if not keys:
            return
        self.hits += hit > 0
        self.misses += hit == 0 and seq.promised_len > self._block_size
        self.saved_tokens += seq.num_cached
        first, end = hit, len(keys)
        if self._states:
            end = (seq.split_at or 0) // self._block_size
            first = max(0, end - 1)
        seq.announced = [key.digest for key in reversed(keys[first:end])]
        self._coming.update(seq.announced)

    def register(self, seq: Sequence) -> bool:
        """Give keys to the full blocks verified since the last time; True if any had been announced."""
        if not self.enabled:
            return False
        size, came = self._block_size, False
        for i in range(len(seq.keys), seq.verified // size):
            key = block_key(seq.parent, seq.tokens[i * size : (i + 1) * size])
            seq.keys.append(key)
            for pool, table in zip(self._pools, seq.tables, strict=True):
                if table[i] != NULL_BLOCK:
                    pool.register(table[i], key)
            if seq.announced and seq.announced[-1] == key.digest:
                self._came(seq.announced.pop())
                came = True
        if self._states and seq.keys and len(seq.keys) * size == seq.length:
            decoding = seq.length >= seq.promised_len
            if decoding or seq.length == seq.split_at:
                self._states.snapshot(seq, seq.keys[-1], decoding=decoding)
        return came

    def forsake(self, seq: Sequence) -> None:
        """What the sequence announced will not come from it."""
        while seq.announced:
            self._came(seq.announced.pop())

    def _came(self, digest: bytes) -> None:
        self._coming[digest] -= 1
        if not self._coming[digest]:
            del self._coming[digest]
