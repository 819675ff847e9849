"""From mlx-lm's own caches to KV groups and paged layers: which layer needs what."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.kv.manager import KVGroup

Shape = tuple[int, int]  # kv_heads, head_dim


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one cache entry, as the model itself writes them."""

    window: int | None
    key_shape: Shape
    value_shape: Shape
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        elements = self.key_shape[0] * self.key_shape[1] + self.value_shape[0] * self.value_shape[1]
        return elements * self.dtype.size


def inspect_layers(model: nn.Module, model_type: str) -> tuple[list[LayerKV], int]:
    """Run one token on the model's native caches and read what they hold; nothing is evaluated.

    Returns:
        The cache entries, and the size of the vocabulary.

    Raises:
        UnsupportedModelError: a layer keeps something else than keys and values of past tokens.
    """
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) is not KVCache and not (type(cache) is RotatingKVCache and cache.keep == 0):
            raise UnsupportedModelError(
                f"{model_type} keeps its state in {type(cache).__name__}, which is not paged yet",
                "supported: models whose layers keep plain or sliding-window keys and values",
            )
    logits = model(mx.array([[0]]), cache=caches)
    layers = []
    for index, cache in enumerate(caches):
        if cache.keys is None:
            raise UnsupportedModelError(f"{model_type} leaves the cache of layer {index} empty")
        layers.append(
            LayerKV(
                window=cache.max_size if isinstance(cache, RotatingKVCache) else None,
                key_shape=(cache.keys.shape[1], cache.keys.shape[3]),
                value_shape=(cache.values.shape[1], cache.values.shape[3]),
                dtype=cache.keys.dtype,
            )
        )
    return layers, logits.shape[-1]


def group_layers(layers: list[LayerKV]) -> list[KVGroup]:
    """Layers of equal window and bytes a token share a pool."""
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.window, layer.bytes_per_token), []).append(index)
    return [
        KVGroup(layers=tuple(indices), window=window, bytes_per_token=size * len(indices))
        for (window, size), indices in members.items()
    ]


BACKBONES = ("model", "language_model.model", "backbone", "transformer")


class RowSelector:
    """Keeps only the rows of a step that the output head must see.

    The module that computes the hidden states gets a subclass of its own class; outside of a step it
    behaves as before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: mx.array | None = None
        self.backbone = next((m for path in BACKBONES if (m := _submodule(model, path)) is not None), None)
        if self.backbone is None:
            return
        original, selector = type(self.backbone), self

        def call(module: nn.Module, *args: object, **kwargs: object) -> mx.array:
            hidden = original.__call__(module, *args, **kwargs)
            return hidden if selector.rows is None else mx.take(hidden, selector.rows, axis=0)

        self.backbone.__class__ = type(original.__name__, (original,), {"__call__": call})

    def remove(self) -> None:
        """Give the module its own class back; the cycle with it would keep the weights alive."""
        if self.backbone is not None:
            self.backbone.__class__ = type(self.backbone).__bases__[0]
            self.backbone = None


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        part = getattr(model, name, None)
        if not isinstance(part, nn.Module):
            return None
        model = part
    return model if hasattr(model, "layers") or hasattr(model, "h") else None
