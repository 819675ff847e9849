"""Two steps on the device at once, with every pool still written in place.

MLX copies an array that it writes to while somebody still reads it. A step that is started before the one
before it is done would so copy each layer's pool. Hence every step goes to the device in two halves, cut
at the keys of its middle layer, and a half follows only when the half before last is done:

  N's first · N's second · wait for N's first · N+1's first · wait for N's second, its tokens · N+1's second

So the pools that a half writes have no reader left, however many operations are in flight, and the device
has the next half at hand while the host builds a step or hands out tokens. MLX may say that a result is
there a moment before it lets go of what that was read from: hence the cut at keys, a whole MLP behind the
last read. A layer of the second half that reads a pool of the first (KV shared by layers) costs a copy,
never a wrong result; of decode steps `ferrum-mlx verify` would show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step gives, not evaluated yet.

    Attributes:
        middle: the keys at the cut; None if the step cannot be cut, and goes whole.
        first: the pools that the first half writes. MLX holds what it was asked to evaluate until all of
            that is done, so they must not be asked for with the second half.
        rest: all else.
    """

    middle: mx.array | None
    first: Sequence[mx.array]
    rest: Sequence[mx.array]


class Halves:
    """Steps in the order of their start; the contract allows two under way."""

    def __init__(self) -> None:
        self._under_way = 0
        self._middle: mx.array | None = None  # of the latest step; evaluated when its first half is done
        self._waiting: Sequence[mx.array] = ()  # the latest step's second half

    def start(self, parts: Parts) -> None:
        """Evaluate a step, the second half of one ahead when the step before it has landed."""
        if parts.middle is None:
            mx.async_eval(*parts.first, *parts.rest)
        else:
            ahead = self._middle is not None and self._under_way > 0
            if ahead:
                mx.eval(self._middle)
            mx.async_eval(parts.middle, *parts.first)
            if ahead:
                self._waiting = parts.rest
            else:
                mx.async_eval(*parts.rest)
        self._middle = parts.middle
        self._under_way += 1

    @property
    def cut(self) -> bool:
        """The latest step went in two halves."""
        return self._middle is not None

    def landed(self) -> None:
        """The oldest step is done: the one ahead of it goes on."""
        self._under_way -= 1
        if self._waiting:
            mx.async_eval(*self._waiting)
            self._waiting = ()

    def reset(self) -> None:
        """Forget steps that failed."""
        self._under_way, self._middle, self._waiting = 0, None, ()
