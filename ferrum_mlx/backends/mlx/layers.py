"""From mlx-lm's own caches to KV groups, states and paged layers: which layer needs what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ferrum_mlx.backends.mlx.trace import Trace, trace
from ferrum_mlx.errors import FerrumError, UnsupportedModelError, one_line
from ferrum_mlx.kv.precision import head_bytes
from ferrum_mlx.kv.sequence import KVGroup

Shape = tuple[int, int]  # kv_heads, head_dim


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one cache, as the model itself writes them; `bits` a number are kept, None is all."""

    window: int | None
    key_shape: Shape
    value_shape: Shape
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def bytes_per_token(self) -> int:
        shapes = self.key_shape, self.value_shape
        return sum(heads * head_bytes(dim, self.bits, self.dtype.size) for heads, dim in shapes)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The entries of one ArraysCache, without the batch; None stays empty."""

    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[mx.Dtype | None, ...]

    @property
    def num_bytes(self) -> int:
        entries = zip(self.shapes, self.dtypes, strict=True)
        return sum(mx.zeros(shape, dtype).nbytes for shape, dtype in entries if shape is not None and dtype)


Part = LayerKV | LayerState


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the cache objects that a model takes: several parts, or one that attention could page."""

    parts: tuple[Part, ...]
    several: bool  # the model indexes it, even if there is one part
    paged: bool  # plain or sliding-window keys and values, which the attention dispatcher serves


@dataclass(frozen=True, slots=True)
class Inspection:
    entries: tuple[Entry, ...]
    vocab_size: int
    trace: Trace  # which modules get which entry, and in which shapes

    @property
    def kv(self) -> list[LayerKV]:
        return [part for entry in self.entries for part in entry.parts if isinstance(part, LayerKV)]

    @property
    def states(self) -> list[tuple[int, LayerState]]:
        """With the number of the entry."""
        numbered = ((i, part) for i, entry in enumerate(self.entries) for part in entry.parts)
        return [(i, part) for i, part in numbered if isinstance(part, LayerState)]


def inspect_layers(model: nn.Module, model_type: str, kv_bits: int | None = None) -> Inspection:
    """Run a few tokens on the model's native caches and see what they hold; nothing is evaluated.

    Args:
        kv_bits: that our pools keep of a number.

    Raises:
        UnsupportedModelError: a layer keeps something else than keys and values of past tokens, or a
            state of a size that does not depend on how many there are.
    """
    fewer, more = (make_prompt_cache(model) for _ in range(2))
    for cache in fewer:
        _check_kind(cache, model_type)
    try:
        traced, logits = trace(model, fewer, more)
    except FerrumError:
        raise
    except Exception as error:  # a layer may want another device, or a package
        raise UnsupportedModelError(f"{model_type} does not run here: {one_line(error)}") from error
    entries = []
    for index, (cache, other) in enumerate(zip(fewer, more, strict=True)):
        several = isinstance(cache, CacheList)
        caches, others = (cache.caches, other.caches) if several else ([cache], [other])
        parts = tuple(_part(c, o, index, model_type, kv_bits) for c, o in zip(caches, others, strict=True))
        entries.append(Entry(parts, several, paged=type(cache) in (KVCache, RotatingKVCache)))
    return Inspection(tuple(entries), logits.shape[-1], traced)


def _check_kind(cache: Any, model_type: str) -> None:
    """Take exactly the kinds whose rules are known here: a subclass may have others."""
    if type(cache) is CacheList:
        for part in cache.caches:
            if type(part) is CacheList:
                raise UnsupportedModelError(f"{model_type} keeps caches within caches within caches")
            _check_kind(part, model_type)
    elif type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache):
        raise UnsupportedModelError(
            f"{model_type} keeps its state in {type(cache).__name__}, whose rules are not known here",
            "supported: keys and values (plain, sliding window, chunked) and the arrays of recurrent layers",
        )
    elif getattr(cache, "keep", 0):
        raise UnsupportedModelError(f"{model_type} keeps the first {cache.keep} tokens beside its window")


def _part(cache: Any, other: Any, index: int, model_type: str, kv_bits: int | None) -> Part:
    """`other` has seen more tokens."""
    if isinstance(cache, ArraysCache):
        shapes, more = (
            tuple(None if a is None else a.shape[1:] for a in arrays.cache) for arrays in (cache, other)
        )
        if shapes != more:
            raise UnsupportedModelError(f"the state of {model_type}'s layer {index} grows with the context")
        return LayerState(shapes, tuple(None if a is None else a.dtype for a in cache.cache))
    if cache.keys is None:
        raise UnsupportedModelError(f"{model_type} leaves the cache of layer {index} empty")
    return LayerKV(
        window=getattr(cache, "max_size", getattr(cache, "chunk_size", None)),
        key_shape=(cache.keys.shape[1], cache.keys.shape[3]),
        value_shape=(cache.values.shape[1], cache.values.shape[3]),
        dtype=cache.keys.dtype,
        bits=kv_bits,
    )


def group_layers(layers: Sequence[LayerKV]) -> list[KVGroup]:
    """Layers of equal window and bytes a token share a pool."""
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.window, layer.bytes_per_token), []).append(index)
    return [
        KVGroup(layers=tuple(indices), window=window, bytes_per_token=size * len(indices))
        for (window, size), indices in members.items()
    ]
