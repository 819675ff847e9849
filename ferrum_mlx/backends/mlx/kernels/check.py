"""Whether the Metal kernel computes, on this device and for this model, what gathered keys give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ferrum_mlx.backends.mlx.kernels.launch import MAX_ROWS, MetalAttention, refusal
from ferrum_mlx.backends.mlx.kernels.tables import TableStorage
from ferrum_mlx.backends.mlx.kernels.trial import trial_step, trial_storage
from ferrum_mlx.backends.mlx.pools import PagedStorage
from ferrum_mlx.errors import FerrumError, one_line

# Largest difference, values being around 1: of rounding an output and the weights behind it.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 4e-2}
# Lengths of sequences that share a step: one token, a block, some; and a long one, whose keys are split.
CONTEXTS = ((1, 16, 83), (1100,))


def switch_on(
    storages: Sequence[PagedStorage],
    block_size: int,
    make: Callable[[], MetalAttention],
    check_model: Callable[[], None],
) -> list[str]:
    """Give a kernel to all storages that it serves rightly: why not to the others. They have attended before.

    Args:
        check_model: raises where the model's logits are not what they are alone.
    """
    total, reasons = len(storages), []
    tables = [storage for storage in storages if isinstance(storage, TableStorage)]
    if other := total - len(tables):
        reasons.append(f"{other} of {total} layers keep keys and values in a form of their own")
    if looped := [storage for storage in tables if storage.asked is None]:
        reasons.append(f"{len(looped)} of {total} layers compute with keys and values themselves")
    kinds: dict[object, list[TableStorage]] = {}
    for storage in tables:
        if storage.asked is not None:
            kinds.setdefault(_kind(storage), []).append(storage)
    if not kinds:
        return reasons
    try:
        kernel = make()
    except Exception as error:
        return [f"it does not run on this device: {one_line(error)}"]
    for alike in kinds.values():
        if reason := _reason(kernel, alike[0], block_size):
            reasons.append(f"{len(alike)} of {total} layers: {reason}")
        else:
            for storage in alike:
                storage.kernel = kernel
    try:
        check_model()
    except FerrumError as error:
        for storage in tables:
            storage.kernel = None
        reasons.append(f"through it, {error}")
    return reasons


def _kind(storage: TableStorage) -> object:
    assert storage.asked is not None
    asked, how = storage.asked, storage.asked.how
    shapes = storage.keys.shape[1:], storage.values.shape[1:], storage.dtype
    return shapes, asked.heads, asked.dtype, how.scale, how.window, how.sinks is not None


def _reason(kernel: MetalAttention, storage: TableStorage, block_size: int) -> str | None:
    asked = storage.asked
    assert asked is not None
    shapes = storage.keys.shape[1:], storage.values.shape[1:]
    if reason := refusal(asked.heads, asked.dtype, storage.dtype, *shapes):
        return reason
    try:
        return difference(kernel, storage, block_size)
    except Exception as error:  # a compiler or a device that cannot
        return f"it does not run on this device: {one_line(error)}"


def difference(kernel: MetalAttention, storage: TableStorage, block_size: int) -> str | None:
    """Decode and verify rows as the storage's layer asks for them, over random K and V; None is right."""
    asked = storage.asked
    assert asked is not None
    how, dtype = asked.how, storage.dtype
    for contexts in CONTEXTS:
        for rows in (1, MAX_ROWS):
            step, num_slots = trial_step(contexts, rows, block_size, how.window)
            trial = trial_storage(num_slots, storage.keys.shape[1:], storage.values.shape[1:], dtype)
            queries = mx.random.normal(
                (step.num_tokens, asked.heads, 1, storage.keys.shape[2]), dtype=dtype, key=mx.random.key(2)
            )
            given = step, queries, how.window, how.scale, how.sinks
            want = trial.attend(*given).astype(mx.float32)
            trial.kernel = kernel
            apart = mx.abs(trial.attend(*given).astype(mx.float32) - want).max().item()
            if not apart <= TOLERANCE[dtype]:  # also refuses NaN
                return f"{rows} rows over up to {max(contexts)} keys are off by {apart:.3g} on this device"
    return None
