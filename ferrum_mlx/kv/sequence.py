"""Plain data of the KV cache: groups of layers, and what one sequence owns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ferrum_mlx.kv.prefix import BlockKey


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal kind, window and bytes a token; they share a pool and a block table.

    window is the sliding window in tokens, None for full attention.
    """

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int  # K and V of all its layers

    def first_key(self, length: int) -> int:
        """First position that the next token, at position `length`, still attends to."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def window_blocks(self, block_size: int) -> int:
        """Most blocks that the window of one sequence touches."""
        assert self.window is not None
        return -(-self.window // block_size) + 1


@dataclass(slots=True)
class Sequence:
    """One cache.

    position   0 ........ shared ........ verified ........ length ........ reserved
               | found by key | ours, findable | drafts, perhaps | writable now |

    Attributes:
        tokens: of the computed positions.
        keys: of the full blocks that are findable, from the first on.
        tables: one append-only block table a group.
        left: by group, leading blocks that the window has left, null in the table.
        announced: keys of the prompt's blocks that this sequence is about to compute, last first.
        state, restore: slots of its recurrent state and of the snapshot it starts from; 0 is none.
        rolling: key of the last snapshot taken while decoding.
    """

    promised_len: int
    tables: list[list[int]]
    left: list[int]
    root: bytes = b""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    verified: int = 0
    num_cached: int = 0
    split_at: int | None = None
    keys: list[BlockKey] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)
    state: int = 0
    restore: int = 0
    rolling: BlockKey | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def owned(self, group: int) -> int:
        """Blocks it holds a reference on."""
        return len(self.tables[group]) - self.left[group]

    @property
    def parent(self) -> bytes:
        """The digest behind which the next block's key goes."""
        return self.keys[-1].digest if self.keys else self.root
