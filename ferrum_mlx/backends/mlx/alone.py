"""The cache of one sequence within one step, for modules that run their sequences one at a time."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from ferrum_mlx.backends.mlx.pools import PagedStorage
from ferrum_mlx.backends.step import Segment, Step, window_of
from ferrum_mlx.errors import UnsupportedModelError


class SequenceKV(KVCache):
    """mlx-lm's own kind of cache over the pages of one sequence.

    The keys and values it returns are plain arrays from the first position that a row attends to:
    `start_position`, 0 without a window. A chunked cache is one with a window of the chunk's size, under
    the mask that its model makes.
    """

    def __init__(self, storage: PagedStorage, step: Step, segment: Segment, window: int | None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = segment.pos_offset
        self.start_position = segment.first_key(window)
        self._storage, self._step, self._segment, self._window = storage, step, segment, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        seen = self._storage.extend(self._step, self._segment, self._window, keys, values)
        self.keys, self.values = seen
        return seen

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As mlx-lm's, over the keys from start_position on; also right after the update."""
        check_window(window_size, self._window)
        past = self._segment.pos_offset - self.start_position
        window = window_of(window_size or None, self._window)
        if N == 1 and (window is None or past < window):
            return None
        if return_array or (window is not None and past + N > window):
            mask: mx.array = create_causal_mask(N, past, window_size=window)
            return mask
        return "causal"

    def empty(self) -> bool:
        return self.offset == 0

    def maybe_trim_front(self) -> None:
        """Nothing to do: the pages that a window has left are freed by their owner."""


def check_window(masked: int | None, kept: int | None) -> None:
    """Refuse a mask that lets rows see more than the cache keeps."""
    if masked and kept and masked > kept:
        raise UnsupportedModelError(
            f"the model masks {masked} tokens where its cache keeps {kept}",
            "mlx-lm itself then gives other results for other chunks",
            "choose another model",
        )
