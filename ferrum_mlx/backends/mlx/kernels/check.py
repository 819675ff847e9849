"""Whether the Metal kernel computes, on this device and for this model, what gathered keys give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ferrum_mlx.backends.mlx.kernels.launch import MAX_ROWS, How, MetalAttention, refusal
from ferrum_mlx.backends.mlx.kernels.tables import TableStorage
from ferrum_mlx.backends.mlx.kernels.trial import trial_step, trial_storage
from ferrum_mlx.backends.mlx.pools import PagedStorage
from ferrum_mlx.backends.mlx.quantized import QuantizedStorage
from ferrum_mlx.backends.step import Step
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
    if bits := next((storage.bits for storage in storages if isinstance(storage, QuantizedStorage)), None):
        return [f"it reads K and V in the model's own dtype, not in {bits} bits (--kv-bits {bits})"]
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
    return (
        storage.shapes,
        storage.dtype,
        asked.heads,
        asked.dtype,
        how.scale,
        how.window,
        how.sinks is not None,
    )


def _reason(kernel: MetalAttention, storage: TableStorage, block_size: int) -> str | None:
    asked = storage.asked
    assert asked is not None
    if reason := refusal(asked.heads, asked.dtype, storage.dtype, *storage.shapes):
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
            trial = trial_storage(num_slots, *storage.shapes, dtype)
            shape = step.num_tokens, asked.heads, 1, storage.shapes[0][1]
            queries = mx.random.normal(shape, dtype=dtype, key=mx.random.key(2))
            want = _gathered(trial, step, queries, how)
            trial.kernel = kernel
            got = trial.attend(step, queries, how.window, how.scale, how.sinks)
            apart = np.abs(np.array(got.astype(mx.float32)) - want).max()
            if not apart <= TOLERANCE[dtype]:  # also refuses NaN
                return f"{rows} rows over up to {max(contexts)} keys are off by {apart:.3g} on this device"
    return None


def _gathered(trial: TableStorage, step: Step, queries: mx.array, how: How) -> np.ndarray:
    """In float32: MLX rounds scores to 16 bits where its own attention is not fused."""
    wide = TableStorage(0, 1, *trial.shapes, mx.float32)
    wide.keys, wide.values = (array.astype(mx.float32) for array in (trial.keys, trial.values))
    sinks = None if how.sinks is None else how.sinks.astype(mx.float32)
    return np.array(wide.attend(step, queries.astype(mx.float32), how.window, how.scale, sinks))
