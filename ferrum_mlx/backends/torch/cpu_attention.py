"""The CPU's kernel for decode and verify rows, as tables.PagedAttention, on the threads torch computes with.

Torch's threads are a team of OpenMP's. Asked directly, it does the tasks of a kernel in 2 µs more than they
take. Threads of our own would have to be woken for each layer, on cores that the team still waits on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, from_dtype, int64, types
from numba.extending import intrinsic

from ferrum_mlx.backends.torch.cpu_kernel import PIECE, attention, merge
from ferrum_mlx.backends.torch.tables import How, RowTables

_ARGUMENTS = np.dtype(
    [
        *((name, np.int64) for name in ("next", "count", "rows", "tokens", "kv_heads", "slots")),
        *((name, np.int64) for name in ("sequences", "num_blocks", "block_size", "window")),
        *((name, np.int64) for name in ("sums", "stats", "queries", "keys", "values")),  # addresses
        *((name, np.int64) for name in ("starts", "counts", "contexts", "firsts", "blocks", "tasks")),
        ("scale", np.float32),
        ("softcap", np.float32),
    ]
)
_NO_SINKS = np.empty(0, np.float32)
Team = Callable[[int, int], None]  # runs a function of that address, with that argument, on all threads


def team(threads: int) -> Team:
    """Torch's threads; where its OpenMP cannot be found the calling one alone."""
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is None or threads == 1:
        return lambda function, argument: alone(function)(argument)
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return lambda function, argument: parallel(function, argument, threads, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What layers have in common that attend alike in a step; `held` owns what `given` points to."""

    worker: Any
    given: np.ndarray
    sums: np.ndarray
    stats: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    held: tuple[np.ndarray, ...]


class CPUAttention:
    """Reads float32 and float16 pools whose heads lie one behind the other, for float32 queries."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: RowTables,
        out: torch.Tensor,
        how: How,
    ) -> None:
        key: Hashable = how.scale, how.window, how.softcap, keys.shape, values.shape, queries.shape
        plan = tables.made.get(key)
        if plan is None:
            _check(queries, keys, values)
            plan = tables.made[key] = _planned(queries, keys, values, tables, how)
        queries = queries.contiguous()
        given = plan.given
        given["next"] = 0
        given["queries"], given["keys"], given["values"] = (
            tensor.data_ptr() for tensor in (queries, keys, values)
        )
        self._team(plan.worker.address, given.ctypes.data)
        sinks = _NO_SINKS if how.sinks is None else how.sinks.float().numpy()
        merge(plan.sums, plan.stats, plan.starts, plan.counts, plan.ends, sinks, out.numpy())


def _check(queries: torch.Tensor, *pools: torch.Tensor) -> None:
    """Raises ValueError for what would be read wrongly."""
    if queries.dtype != torch.float32:
        raise ValueError(f"queries are {queries.dtype}, and float32 ones are computed")
    for pool in pools:
        if pool.dtype not in (torch.float16, torch.float32) or pool.dtype != pools[0].dtype:
            raise ValueError(f"a pool is {pool.dtype}, and float32 and float16 are read")
        if not pool.numel() or not pool.transpose(0, 1).is_contiguous():
            raise ValueError("the heads of a pool do not lie one behind the other")


def _planned(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: RowTables, how: How
) -> _Plan:
    tensors = tables.starts, tables.counts, tables.contexts, tables.firsts, tables.blocks
    starts, counts, contexts, _, blocks = arrays = tuple(tensor.numpy() for tensor in tensors)
    lowest = np.maximum(contexts - counts + 1 - how.window, 0) if how.window else np.zeros_like(contexts)
    pieces = [np.arange(low // PIECE * PIECE, end, PIECE) for low, end in zip(lowest, contexts, strict=True)]
    lengths = [len(piece) for piece in pieces]
    tasks = np.stack([np.repeat(np.arange(len(pieces)), lengths), np.concatenate(pieces)], axis=1)
    slots, kv_heads, head_dim = keys.shape
    group, value_dim = queries.shape[1] // kv_heads, values.shape[2]
    count, rows = len(tasks) * kv_heads, int(counts.max())
    sums, stats = (np.empty((count, rows, group, last), np.float32) for last in (value_dim, 2))
    given = np.zeros((), _ARGUMENTS)
    for name, array in zip(
        ("sums", "stats", "starts", "counts", "contexts", "firsts", "blocks", "tasks"),
        held := (sums, stats, *arrays, tasks),
        strict=True,
    ):
        given[name] = array.ctypes.data
    numbers = (count, rows, len(queries), kv_heads, slots)
    for name, number in zip(("count", "rows", "tokens", "kv_heads", "slots"), numbers, strict=True):
        given[name] = number
    given["sequences"], given["num_blocks"] = len(starts), len(blocks)
    given["block_size"], given["window"] = tables.block_size, how.window or 0
    given["scale"], given["softcap"] = how.scale, how.softcap or 0
    worker = _worker(head_dim, value_dim, group, keys.dtype == torch.float16)
    return _Plan(worker, given, sums, stats, starts, counts, np.cumsum(lengths), held)


@intrinsic
def _claim(typing: Any, given: Any) -> Any:
    """The first number behind a pointer, and one is added to it, whoever else does so at once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.bitcast(args[0], ir.PointerType(ir.IntType(64)))
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return int64(given), generate


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """To numbers of `like`'s type."""
    pointer = types.CPointer(like)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(int64, like), generate


@cache
def _worker(head_dim: int, value_dim: int, group: int, half: bool) -> Any:
    """What each thread runs: it does tasks until all are claimed."""
    attend = attention(head_dim, value_dim, group)
    kept = np.uint16(0) if half else np.float32(0)
    one, index = np.float32(0), np.int64(0)

    @cfunc(types.void(types.CPointer(from_dtype(_ARGUMENTS))), cache=True)
    def work(pointer: Any) -> None:
        given = carray(pointer, (1,))[0]
        heads, count, sequences = given.kv_heads, given.count, given.sequences
        sums = carray(_pointer(given.sums, one), (count, given.rows, group, value_dim))
        stats = carray(_pointer(given.stats, one), (count, given.rows, group, 2))
        queries = carray(_pointer(given.queries, one), (given.tokens, heads * group, head_dim))
        keys = carray(_pointer(given.keys, kept), (heads, given.slots, head_dim))
        values = carray(_pointer(given.values, kept), (heads, given.slots, value_dim))
        starts = carray(_pointer(given.starts, index), (sequences,))
        counts = carray(_pointer(given.counts, index), (sequences,))
        contexts = carray(_pointer(given.contexts, index), (sequences,))
        firsts = carray(_pointer(given.firsts, index), (sequences,))
        blocks = carray(_pointer(given.blocks, index), (given.num_blocks,))
        tasks = carray(_pointer(given.tasks, index), (count // heads, 2))
        while True:
            number = _claim(pointer)
            if number >= count:
                return
            attend(
                sums, stats, queries, keys, values, starts, counts, contexts, firsts, blocks,
                given.block_size, tasks, given.scale, given.window, given.softcap, number, number + 1,
            )  # fmt: skip

    return work
