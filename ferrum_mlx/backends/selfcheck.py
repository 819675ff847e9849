"""Before the first request: does this model, paged and packed, compute what it computes alone?

Two sequences share steps, one of them in two chunks, and end as decode rows beside each other; their
logits are compared with the model's own on each sequence alone. A model that fails is refused: no
architecture is trusted by its name.

Pools that keep fewer bits round too coarsely to tell a wrong window or a lost sink. So the model is first
checked over small pools of its own dtype, which stand in for them, and then the pools by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ferrum_mlx import nearties
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.batch import ItemResult, LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.errors import FerrumError, ModelFileError, UnsupportedModelError, one_line
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.kv.precision import is_quantized
from ferrum_mlx.model_info import ModelInfo

PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1])
SLOTS, SIZES = np.array([2, 7, 1, 8]), np.array([1.0, 4.0, 16.0, 64.0])  # of a pool's own check: rows


class QuantizedPool(Protocol):
    """K or V of one layer in fewer bits, [slots, heads, head_dim]."""

    def whole(self, num_slots: int) -> Any:
        """What can stand in its place, with so many slots, and keeps every bit."""
        ...

    def read_back(self, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write float32 rows, [n, heads, head_dim], to slots: what is read then, and the rows rounded."""
        ...


def check_all(executor: PagedExecutor, storages: Sequence[Any]) -> None:
    """`check`, and again for each LoRA adapter, with one sequence through it and one through none.

    Args:
        storages: of all layers, each with its pools as `keys` and `values`; those are QuantizedPools where
            the executor keeps fewer bits.
    """
    adapters = ["", *executor.adapter_names]
    if is_quantized(executor.info.kv_dtype):
        with _whole_kv(executor, storages):
            for adapter in adapters:
                check(executor, adapter, exact_kv=True)
        for storage in storages:
            for pool in (storage.keys, storage.values):
                _check_pool(executor.info, pool)
    for adapter in adapters:
        check(executor, adapter)


def check(executor: ModelExecutor, adapter: str = "", *, exact_kv: bool = False) -> None:
    """Raises UnsupportedModelError when the paged logits are not the model's own.

    Args:
        adapter: that the longer sequence goes through.
        exact_kv: every bit of K and V is kept.
    """
    model_type = executor.info.model_type
    prompts = [[token % executor.info.vocab_size for token in prompt] for prompt in PROMPTS]
    adapters = [adapter, ""]
    expected = [_alone(executor, *pair, exact_kv) for pair in zip(prompts, adapters, strict=True)]
    caches: list[int] = []
    try:
        results = _run(executor, prompts, adapters, caches)
    except UnsupportedModelError as error:  # out of a layer, which does not know the type
        raise UnsupportedModelError(f"{model_type}: {error.what}", error.allowed, error.next_step) from error
    except FerrumError:
        raise
    except Exception as error:  # whatever an architecture does with cache objects it does not expect
        raise UnsupportedModelError(
            f"{model_type} cannot be driven through paged attention: {one_line(error)}",
            next_step="choose another model",
        ) from error
    finally:
        for cache_id in caches:
            executor.release_cache(cache_id)
    for want, got in zip(expected, results, strict=True):
        _compare(executor.info, want, got.logits, exact_kv)


@contextmanager
def _whole_kv(executor: PagedExecutor, storages: Sequence[Any]) -> Iterator[None]:
    """Every bit of K and V is kept, in pools that hold no more than a check's sequences."""
    kv, pools = executor.kv, [(storage.keys, storage.values) for storage in storages]
    num_blocks = sum(-(-len(prompt) // kv.block_size) for prompt in PROMPTS)
    num_slots = (num_blocks + 1) * kv.block_size  # block 0 is the null block
    executor.kv = kv.of_size(num_blocks)
    for storage in storages:
        storage.keys, storage.values = (pool.whole(num_slots) for pool in (storage.keys, storage.values))
    try:
        yield
    finally:
        executor.kv = kv
        for storage, (keys, values) in zip(storages, pools, strict=True):
            storage.keys, storage.values = keys, values


def _check_pool(info: ModelInfo, pool: Any) -> None:
    """Raises UnsupportedModelError when a pool does not give back what was written, rounded."""
    _, heads, head_dim = pool.shape
    if not heads * head_dim:
        return  # keys alone are kept
    # slots out of order, and no two rows of a size
    rows = np.random.default_rng(0).standard_normal((len(SLOTS), heads, head_dim)) * SIZES[:, None, None]
    got, want = pool.read_back(SLOTS, rows.astype(np.float32))
    apart = float((np.abs(got - want).max(axis=(1, 2)) / SIZES).max())
    if not apart <= nearties.tolerance(info.dtype):  # also refuses NaN
        raise UnsupportedModelError(
            f"KV in {info.kv_dtype} does not give back what {info.model_type} writes: off by {apart:.3g}",
            next_step="leave --kv-bits away",
        )


def _alone(executor: ModelExecutor, prompt: list[int], adapter: str, exact_kv: bool) -> np.ndarray:
    """[vocab]: the last token's logits by the model itself."""
    info = executor.info
    try:
        logits: np.ndarray = executor.forward(prompt, adapter=adapter, exact_kv=exact_kv)[-1]
    except Exception as error:  # a kernel may want another device
        raise UnsupportedModelError(f"{info.model_type} does not run here: {one_line(error)}") from error
    if not _is_sound(logits):
        raise ModelFileError(
            f"{info.model_id} computes values that are not finite: its weights are damaged",
            next_step="get the model again",
        )
    return logits


def is_bitwise(executor: ModelExecutor) -> bool:
    """Whether a token's logits are the same bits, its prompt computed whole or cut into chunks."""
    prompt = [token % executor.info.vocab_size for token in PROMPTS[0]]
    whole, cut = (_last_logits(executor, prompt, cuts) for cuts in ([], [4, len(prompt) - 1]))
    return np.array_equal(whole, cut)


def _last_logits(executor: ModelExecutor, prompt: list[int], cuts: list[int]) -> np.ndarray:
    admission = executor.try_admit_prefill("selfcheck", prompt, use_prefix=False)
    assert isinstance(admission, Admitted)
    cache_id = admission.cache_id
    try:
        executor.reserve_kv_slots([KvSlotRequest(cache_id, len(prompt))])
        for start, end in zip([0, *cuts], cuts, strict=False):
            executor.prefill(_chunk(cache_id, prompt[start:end], start))
        logits = executor.prefill(_final(cache_id, prompt, cuts[-1] if cuts else 0)).logits
    finally:
        executor.release_cache(cache_id)
    assert logits is not None
    return logits


def _is_sound(logits: np.ndarray) -> bool:
    """-inf is how a model bans a token."""
    return bool((logits < np.inf).all() and np.isfinite(logits).any())  # the first refuses NaN too


def _run(
    executor: ModelExecutor, prompts: list[list[int]], adapters: list[str], caches: list[int]
) -> list[ItemResult]:
    long, short = prompts
    for prompt, adapter in zip(prompts, adapters, strict=True):
        name = f"selfcheck-{len(caches)}"
        admission = executor.try_admit_prefill(name, prompt, use_prefix=False, adapter=adapter)
        if not isinstance(admission, Admitted):
            raise UnsupportedModelError(f"the KV pool cannot hold {sum(map(len, prompts))} tokens")
        caches.append(admission.cache_id)
    executor.reserve_kv_slots([KvSlotRequest(c, len(p)) for c, p in zip(caches, prompts, strict=True)])
    a, b = caches
    executor.batch_prefill([_chunk(a, long[:4], 0), _chunk(b, short[:-1], 0)])
    executor.batch_prefill([_chunk(a, long[4:-1], 4)])
    return executor.batch_prefill([_final(a, long, len(long) - 1), _final(b, short, len(short) - 1)])


def _chunk(cache_id: int, tokens: list[int], start: int) -> UnifiedItem:
    return UnifiedItem(cache_id=cache_id, q_tokens=tuple(tokens), pos_offset=start, is_final_chunk=False)


def _final(cache_id: int, prompt: list[int], start: int) -> UnifiedItem:
    return UnifiedItem(
        cache_id=cache_id, q_tokens=tuple(prompt[start:]), pos_offset=start, logits=LogitsPolicy.FULL
    )


def _compare(info: ModelInfo, want: np.ndarray, got: np.ndarray | None, exact_kv: bool) -> None:
    assert got is not None
    apart = want != got[-1]  # False for what is banned on both sides
    largest = float(np.abs(want[np.isfinite(want)]).max())
    difference = float(np.abs(want[apart] - got[-1][apart]).max(initial=0))
    packed = info.computes_in  # prompts are short: both sides take the same products
    tolerance = nearties.SAME_PRODUCTS if packed else nearties.tolerance(info.dtype)
    if info.kv_dtype and not exact_kv:  # float16 on SmolLM2, packed: 0.024 of the largest
        tolerance = max(tolerance, nearties.tolerance(info.kv_dtype))
    if not difference <= tolerance * max(1.0, largest):  # also refuses NaN
        raise UnsupportedModelError(
            f"{info.model_type} is not exact through paged attention: logits up to {largest:.3g} differ by "
            f"{difference:.3g}",
            next_step="choose another model",
        )
