"""Which rows of a step reach the output head."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class NoRows(Exception):
    """Leaves a forward whose output head has nothing to do; heads need not bear empty arrays."""


class RowSelector:
    """Keeps only the rows of a step that the output head must see.

    The backbone, which computes the hidden states, gets a subclass of its own class; outside of a step
    it behaves as before.
    """

    def __init__(self, backbone: nn.Module | None) -> None:
        self.rows: mx.array | None = None
        self.backbone = backbone
        if backbone is None:
            return
        original, selector = type(backbone), self

        def call(module: nn.Module, *args: object, **kwargs: object) -> mx.array:
            hidden: mx.array = original.__call__(module, *args, **kwargs)
            if selector.rows is None:
                return hidden
            if not selector.rows.size:
                raise NoRows
            return mx.take(hidden, selector.rows, axis=0)

        backbone.__class__ = type(original.__name__, (original,), {"__call__": call})

    def remove(self) -> None:
        """Give the module its own class back; the cycle with it would keep the weights alive."""
        if self.backbone is not None:
            self.backbone.__class__ = type(self.backbone).__bases__[0]
            self.backbone = None
