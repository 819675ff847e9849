"""Paged attention of decode and verify rows on a CPU, compiled by numba: K and V are read where they lie.

A task takes the rows of one sequence, with all query heads of one kv head, and one piece of the keys; the
pieces of a row are put together afterwards. Pieces and tiles begin at fixed positions, so that a row's
sums, and their rounding, follow from its own keys, whatever is computed beside it.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, float32, from_dtype, int32, int64, njit, types, uint16
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

PIECE = 512  # keys of a task
_TILE = 128  # keys whose scores are kept at once; PIECE is a multiple
_LEAST = np.float32(-3e38)
# Of a worker. `sums` and `stats` are [count, rows, group, value_dim or 2] float32, for `merge`; `queries`
# [tokens, heads, head_dim] float32; `keys` and `values` [kv_heads, slots, head_dim or value_dim] float32, or
# float16 seen as uint16; `starts` to `blocks` as in tables.RowTables; `tasks` [count / kv_heads, 2], a
# sequence and the position that a piece of its keys begins at. A `window` or `softcap` of 0 is none.
ARGUMENTS = np.dtype(
    [
        *((name, np.int64) for name in ("next", "done", "count")),  # tasks
        *((name, np.int64) for name in ("rows", "tokens", "kv_heads", "slots")),
        *((name, np.int64) for name in ("sequences", "num_blocks", "block_size", "window")),
        *((name, np.int64) for name in ("sums", "stats", "queries", "keys", "values")),  # addresses
        *((name, np.int64) for name in ("starts", "counts", "contexts", "firsts", "blocks", "tasks")),
        ("scale", np.float32),
        ("softcap", np.float32),
    ]
)
_NEXT, _DONE = 0, 1  # fields of it
_X86 = ("x86_64", "AMD64", "i386", "i686")


def _can_keep() -> bool:
    """Whether compiled code can be kept for the next start: there may be no folder to write to."""
    try:
        njit(cache=True)(_can_keep)
    except RuntimeError:
        return False
    return True


def reads_half() -> bool:
    """Whether the processor converts float16 itself; where it does not, LLVM ends the process."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return platform.machine() not in _X86 or "+f16c" in features


OPTIONS: dict[str, Any] = {
    "fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"},  # but not "there is no NaN, no infinity"
    "error_model": "numpy",
    "nogil": True,
    "cache": _can_keep(),
}


@intrinsic
def _half(typing: Any, bits: Any) -> Any:
    """The float32 of a float16's bits: one instruction, where numba has no such type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return float32(uint16), generate


@intrinsic
def _of_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return float32(int32), generate


@intrinsic
def _increment(typing: Any, pointer: Any, field: Any) -> Any:
    """Add one to a field of ARGUMENTS, whoever else does so at once; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fields = builder.bitcast(args[0], ir.PointerType(ir.IntType(64)))
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", builder.gep(fields, [args[1]]), one, "monotonic")

    return int64(pointer, int64), generate


@intrinsic
def pointer_to(typing: Any, address: Any, like: Any) -> Any:
    """To numbers of `like`'s type."""
    pointer = types.CPointer(like)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(int64, like), generate


def _number(kept: Any) -> Any:
    """float32 of what a pool keeps, in compiled code."""
    raise NotImplementedError


@overload(_number, inline="always", strict=False)
def _compiled_number(kept: Any) -> Any:
    if kept == types.uint16:
        return lambda kept: _half(kept)
    return lambda kept: kept


@njit(inline="always", **OPTIONS)
def _exp(x: Any) -> Any:
    """Of x <= 0, by Cephes' polynomial: libm's own would take most of the time. NaN stays NaN."""
    low = np.float32(-87.0)
    x = low if x < low else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(**OPTIONS)
def _cap(scores: Any, seen: int, softcap: Any) -> None:
    """softcap · tanh(score / softcap), in place."""
    for i in range(scores.shape[0]):
        for g in range(scores.shape[1]):
            for t in range(seen):
                score = scores[i, g, t]
                e = _exp(np.float32(-2) * abs(score) / softcap)
                scores[i, g, t] = np.copysign(softcap * (np.float32(1) - e) / (np.float32(1) + e), score)


@njit(inline="always", **OPTIONS)
def _weigh(scores: Any, first: int, last: int, stats: Any, sums: Any) -> None:
    """exp of a row's scores in their place, up to a factor by which what was summed before shrinks, too.

    Args:
        scores: those from first to last - 1 are of keys that the row sees.
        stats: [2], the largest score so far, and the sum of weights.
        sums: [value_dim], of weights times values so far.
    """
    top = stats[0]
    for t in range(first, last):
        top = scores[t] if scores[t] > top else top
    if top > stats[0]:
        shrink = _exp(stats[0] - top)
        stats[0] = top
        stats[1] *= shrink
        for d in range(len(sums)):
            sums[d] *= shrink
    total = np.float32(0)
    for t in range(first, last):
        weight = _exp(scores[t] - top)
        scores[t] = weight
        total += weight
    stats[1] += total


@njit(**OPTIONS)
def _visible(position: int, seen: int, window: int) -> tuple[int, int]:
    """Which of `seen` keys a row sees, from … to, its position counted from the first of them."""
    first = max(0, min(seen, position - window + 1)) if window else 0
    return first, max(0, min(seen, position + 1))


@njit(**OPTIONS)
def _find(slots: Any, seen: int, base: int, blocks: Any, first: int, block_size: int) -> None:
    """The slots of keys base … base + seen - 1 of a sequence whose table begins at `first`."""
    at, offset = first + base // block_size, base % block_size
    for t in range(seen):
        slots[t] = blocks[at] * block_size + offset
        offset += 1
        if offset == block_size:
            at, offset = at + 1, 0


@njit(inline="always", **OPTIONS)
def _score(scores: Any, queries: Any, keys: Any, slots: Any, seen: int, group: int, head_dim: int) -> None:
    for t in range(seen):
        key = keys[slots[t]]
        for g in range(group):
            product = np.float32(0)
            for d in range(head_dim):
                product += queries[g, d] * _number(key[d])
            scores[g, t] = product


@njit(inline="always", **OPTIONS)
def _sum(
    sums: Any, weights: Any, values: Any, slots: Any, first: int, last: int, group: int, value_dim: int
) -> None:
    for t in range(first, last):
        value = values[slots[t]]
        for g in range(group):
            for d in range(value_dim):
                sums[g, d] += weights[g, t] * _number(value[d])


@cache
def worker(head_dim: int, value_dim: int, group: int, half: bool) -> Any:
    """A function that is given a pointer to ARGUMENTS: each thread in it does tasks until none is left.

    The three sizes are constants of it, else it takes several times as long. It may close over numbers alone:
    with another compiled function numba would not know its kept code again.

    Raises:
        ValueError: this processor does not read float16.
    """
    if half and not reads_half():
        raise ValueError("this processor has no instruction to read float16")
    kept = np.uint16(0) if half else np.float32(0)
    one, index = np.float32(0), np.int64(0)

    @cfunc(types.void(types.CPointer(from_dtype(ARGUMENTS))), **{**OPTIONS, "nogil": False})
    def work(pointer: Any) -> None:
        given = carray(pointer, (1,))[0]
        heads, last_task, sequences = given.kv_heads, given.count, given.sequences
        queries = carray(pointer_to(given.queries, one), (given.tokens, heads * group, head_dim))
        keys = carray(pointer_to(given.keys, kept), (heads, given.slots, head_dim))
        values = carray(pointer_to(given.values, kept), (heads, given.slots, value_dim))
        sums = carray(pointer_to(given.sums, one), (last_task, given.rows, group, value_dim))
        stats = carray(pointer_to(given.stats, one), (last_task, given.rows, group, 2))
        starts = carray(pointer_to(given.starts, index), (sequences,))
        counts = carray(pointer_to(given.counts, index), (sequences,))
        contexts = carray(pointer_to(given.contexts, index), (sequences,))
        firsts = carray(pointer_to(given.firsts, index), (sequences,))
        blocks = carray(pointer_to(given.blocks, index), (given.num_blocks,))
        tasks = carray(pointer_to(given.tasks, index), (last_task // heads, 2))
        window = given.window
        slots = np.empty(_TILE, np.int64)
        while True:
            number = _increment(pointer, _NEXT)
            if number >= last_task:
                return
            head, sequence, piece = number % heads, tasks[number // heads, 0], tasks[number // heads, 1]
            start, count, context = starts[sequence], counts[sequence], contexts[sequence]
            scores = np.empty((count, group, _TILE), np.float32)
            summed = np.zeros((count, group, value_dim), np.float32)
            stat = stats[number]
            stat[..., 0], stat[..., 1] = _LEAST, 0
            own = queries[start : start + count, head * group : (head + 1) * group] * given.scale
            lowest = max(0, context - count + 1 - window) if window else 0
            for base in range(max(piece, lowest // _TILE * _TILE), min(piece + PIECE, context), _TILE):
                seen = min(_TILE, context - base)
                _find(slots, seen, base, blocks, firsts[sequence], given.block_size)
                for i in range(count):
                    _score(scores[i], own[i], keys[head], slots, seen, group, head_dim)
                if given.softcap > 0:
                    _cap(scores, seen, given.softcap)
                for i in range(count):
                    first, last = _visible(context - count + i - base, seen, window)
                    for g in range(group):
                        _weigh(scores[i, g], first, last, stat[i, g], summed[i, g])
                    _sum(summed[i], scores[i], values[head], slots, first, last, group, value_dim)
            sums[number, :count] = summed
            _increment(pointer, _DONE)

    return work


@njit(**OPTIONS)
def merge(sums: Any, stats: Any, starts: Any, counts: Any, ends: Any, sinks: Any, out: Any) -> None:
    """The pieces of each row, weighed by their largest scores.

    Args:
        sums, stats: of the tasks, see ARGUMENTS.
        starts, counts: [sequences] int64, the first row of each, and how many it has.
        ends: [sequences] int64, where each one's tasks end; one without any gets zeros.
        sinks: [heads], one more logit of each head; [0] without them.
        out: [T, heads, value_dim] float32, of which the rows of the sequences are written.
    """
    for sequence in range(len(ends)):
        begin, end = (ends[sequence - 1] if sequence else 0), ends[sequence]
        group = sums.shape[2]
        kv_heads = out.shape[1] // group
        for head in range(out.shape[1]):
            g = head % group
            for i in range(counts[sequence]):
                top = sinks[head] if len(sinks) else _LEAST
                for task in range(begin, end):
                    top = max(top, stats[task * kv_heads + head // group, i, g, 0])
                total = _exp(sinks[head] - top) if len(sinks) else np.float32(0)
                result = out[starts[sequence] + i, head]
                result[:] = 0
                for task in range(begin, end):
                    number = task * kv_heads + head // group
                    share = _exp(stats[number, i, g, 0] - top)
                    total += share * stats[number, i, g, 1]
                    for d in range(len(result)):
                        result[d] += share * sums[number, i, g, d]
                if begin < end:
                    for d in range(len(result)):
                        result[d] /= total
