"""What is read off a model's native caches, and which models are refused for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from ferrum_mlx.backends.mlx.layers import LayerKV, LayerState, group_layers, inspect_layers
from ferrum_mlx.errors import UnsupportedModelError

VOCAB = 11


class Model(nn.Module):
    """Fills the caches it makes by `fill`."""

    def __init__(self, make: Callable[[], list[Any]], fill: Callable[[Any, int], None]) -> None:
        super().__init__()
        self.make_cache, self.fill = make, fill

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        for one in cache:
            self.fill(one, ids.shape[1])
        return mx.zeros((*ids.shape, VOCAB))


def fill(cache: Any, tokens: int) -> None:
    """2 heads of 3 and 5 elements; a state of two float32 entries, the second one unused."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            fill(part, tokens)
    elif isinstance(cache, ArraysCache):
        cache[0] = mx.zeros((1, 4, 6))
    else:
        cache.update_and_fetch(
            mx.zeros((1, 2, tokens, 3), mx.float16), mx.zeros((1, 2, tokens, 5), mx.float16)
        )


def full(window: int | None = None) -> LayerKV:
    return LayerKV(window=window, key_shape=(2, 3), value_shape=(2, 5), dtype=mx.float16)


STATE = LayerState(shapes=((4, 6), None), dtypes=(mx.float32, None))


def test_every_kind_of_cache_is_read() -> None:
    def make() -> list[Any]:
        several = CacheList(ArraysCache(2), KVCache())
        return [KVCache(), RotatingKVCache(max_size=8), ChunkedKVCache(16), ArraysCache(2), several]

    seen = inspect_layers(Model(make, fill), "every")
    assert seen.vocab_size == VOCAB
    assert [entry.parts for entry in seen.entries] == [
        (full(),),
        (full(8),),
        (full(16),),
        (STATE,),
        (STATE, full()),
    ]
    assert [entry.paged for entry in seen.entries] == [True, True, False, False, False]
    assert [entry.several for entry in seen.entries] == [False, False, False, False, True]
    assert [number for number, _ in seen.states] == [3, 4]
    assert STATE.num_bytes == 4 * 6 * 4
    assert full().bytes_per_token == 2 * (3 + 5) * 2
    groups = group_layers(seen.kv)
    assert [(group.layers, group.window) for group in groups] == [((0, 3), None), ((1,), 8), ((2,), 16)]


def grows(cache: Any, tokens: int) -> None:
    cache[0] = mx.zeros((1, tokens))


def raises(cache: Any, tokens: int) -> None:
    raise ValueError("no kernel\nfor this device")


@pytest.mark.parametrize(
    ("make", "fill", "reason"),
    [
        (object, fill, "strange keeps its state in object, whose rules are not known here"),
        (lambda: RotatingKVCache(8, keep=4), fill, "strange keeps the first 4 tokens beside its window"),
        (lambda: CacheList(CacheList(KVCache())), fill, "caches within caches"),
        (lambda: ArraysCache(1), grows, "the state of strange's layer 0 grows with the context"),
        (KVCache, lambda cache, tokens: None, "strange leaves the cache of layer 0 empty"),
        (KVCache, raises, "strange does not run here: ValueError: no kernel for this device"),
    ],
)
def test_other_caches_are_refused_by_name(
    make: Callable[[], Any], fill: Callable[[Any, int], None], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        inspect_layers(Model(lambda: [make()], fill), "strange")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
