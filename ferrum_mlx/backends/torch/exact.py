"""`--numerics exact` on a CPU: a row of a step rounds alike whatever the rows beside it.

A BLAS picks its routine, and so its rounding, by the shape of a product; torch's vectorized loops compute
the last few elements by other instructions than the rest. So products run in tiles of TILE rows, the last
one padded, the functions that would round otherwise run row by row, and a row attends by itself.
Everything else that models do is exact in any shape. It holds for one number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.pools import PoolStorage, explicit_attention, taken

TILE = 16  # rows of a product; tiles of float32 rows then begin at the alignment that the BLAS looks at


class ExactRows(TorchFunctionMode):
    """While entered, torch's functions of rows [..., features] treat each row by itself."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or (func in _PRODUCTS and args[1].ndim == 2):
            return _in_tiles(lambda x: func(x, *args[1:], **kwargs), args[0])
        if func is torch.addmm and len(args) == 3:
            added, x, weight = args
            return _in_tiles(lambda x: torch.addmm(added, x, weight, **kwargs), x)
        if func in _BY_ROW:
            return _by_row(func, args, kwargs)
        return func(*args, **kwargs)


_PRODUCTS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
_BY_ROW = {F.silu, F.gelu, F.sigmoid, F.softplus, torch.sigmoid, torch.Tensor.sigmoid}


def _in_tiles(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """[…, in] → […, out], in products of TILE rows each."""
    flat = x.reshape(-1, x.shape[-1])
    padded = F.pad(flat, (0, 0, 0, -len(flat) % TILE)).contiguous()
    parts = [product(tile) for tile in padded.split(TILE)] if len(flat) else [product(flat)]
    out = torch.cat(parts)[: len(flat)]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _by_row(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    x, *others = args
    if x.ndim < 2:
        result: torch.Tensor = func(x, *others, **kwargs)
        return result
    flat = x.reshape(-1, x.shape[-1])
    rows = [func(row.clone(), *others, **kwargs) for row in flat]
    return torch.stack(rows).reshape(x.shape) if rows else x


class ExactStorage(PoolStorage):
    """A pool whose rows attend one by one, each over a copy of exactly the keys it sees."""

    def attend(
        self,
        step: Step,
        queries: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        out = []
        for segment in step.segments:
            first = segment.first_key(self._window)
            where = self._to_device(step.key_slots(segment, self._group, first))
            keys, values = taken(self.keys, where), taken(self.values, where)
            for row, position in enumerate(range(segment.pos_offset, segment.context_len), segment.start):
                begin = 0 if self._window is None else max(0, position - self._window + 1 - first)
                seen = slice(begin, position + 1 - first)
                own_keys, own_values = (array[seen].clone().transpose(0, 1)[None] for array in (keys, values))
                alone = queries[:, :, row : row + 1].clone(memory_format=torch.contiguous_format)
                result = explicit_attention(alone, [(own_keys, own_values)], None, scale, softcap, sinks)
                out.append(result[0, :, 0])
        return torch.stack(out)[None]
