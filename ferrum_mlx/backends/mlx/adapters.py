"""LoRA adapters beside the Linear layers they change: each row of a step goes through its own, or none.

A changed layer gets a subclass of its own class, which adds to the rows of each adapter what that adds.
Rows without one keep their very bits. Outside of a step, and in steps of no adapter, layers are as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ferrum_mlx.adapters import Adapter, Places, check_fits
from ferrum_mlx.backends.mlx.attention import AdapterRows, StepContext
from ferrum_mlx.backends.mlx.host_layers import HostLinear, host_product
from ferrum_mlx.errors import UnsupportedModelError

Pair = tuple[Any, Any]  # A [rank, in] and B [out, rank]: numpy's beside a host layer, else MLX's


class AdaptedLayers:
    """`dtype` is what products are computed in, `exact` how: see host_layers.

    Raises:
        UnsupportedModelError: an adapter does not fit the model.
        ModelFileError: an adapter lacks tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: Sequence[Adapter],
        context: StepContext,
        dtype: mx.Dtype,
        exact: bool,
    ) -> None:
        self._context, self._exact = context, exact
        self._modules: list[nn.Module] = []
        self.nbytes = 0
        if not adapters:
            return
        modules = dict(model.named_modules())
        places = linear_places(modules)
        for adapter in adapters:
            check_fits(adapter, places)
        for path in dict.fromkeys(path for adapter in adapters for path in adapter.layers):
            pairs = {
                number: self._pair(adapter, path, isinstance(modules[path], HostLinear), dtype)
                for number, adapter in enumerate(adapters, 1)
                if path in adapter.layers
            }
            self._install(modules[path], path, pairs)

    def remove(self) -> None:
        """Give the modules their own classes back."""
        for module in self._modules:
            module.__class__ = type(module).__bases__[0]
        self._modules.clear()

    def _pair(self, adapter: Adapter, path: str, host: bool, dtype: mx.Dtype) -> Pair:
        layer = adapter.layers[path]
        a, b = np.ascontiguousarray(layer.a), np.ascontiguousarray(layer.b)
        if host:
            self.nbytes += a.nbytes + b.nbytes
            return a, b
        arrays = mx.array(a).astype(dtype), mx.array(b).astype(dtype)
        mx.eval(arrays)
        self.nbytes += sum(array.nbytes for array in arrays)
        return arrays

    def _install(self, module: nn.Module, path: str, pairs: dict[int, Pair]) -> None:
        original, context = type(module), self._context

        def call(module: nn.Module, x: mx.array) -> mx.array:
            y: mx.array = original.__call__(module, x)
            rows = context.adapter_rows
            return self._added(rows, path, pairs, x, y) if rows.groups else y

        module.__class__ = type(original.__name__, (original,), {"__call__": call})
        self._modules.append(module)

    def _added(
        self, rows: AdapterRows, path: str, pairs: dict[int, Pair], x: mx.array, y: mx.array
    ) -> mx.array:
        """`y` [..., out], with what the adapters make of `x` [..., in] on their rows."""
        if not isinstance(y, mx.array) or (rows.count is not None and x.size != rows.count * x.shape[-1]):
            raise UnsupportedModelError(
                f"{path} is not a layer of one output a token, so no adapter can change it here",
                next_step="leave the adapter away, or merge it into the model",
            )
        flat, out = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for number, own in rows.groups:
            if number not in pairs:
                continue
            if own is None:
                out = out + self._product(flat, *pairs[number]).astype(out.dtype)
            else:
                out = out.at[own].add(self._product(flat[own], *pairs[number]).astype(out.dtype))
        return out.reshape(y.shape)

    def _product(self, x: mx.array, a: Any, b: Any) -> mx.array:
        if isinstance(a, np.ndarray):
            return host_product(host_product(x, a, self._exact), b, self._exact)
        product: mx.array = (x @ a.T) @ b.T
        return product


def linear_places(modules: dict[str, nn.Module]) -> Places:
    found: dict[str, tuple[int, int] | str] = {}
    for path, module in modules.items():
        if isinstance(module, nn.QuantizedLinear):
            out, groups = module.scales.shape
            found[path] = groups * module.group_size, out
        elif isinstance(module, nn.Linear):
            out, size = module.weight.shape
            found[path] = size, out
        else:
            found[path] = type(module).__name__
    return found
