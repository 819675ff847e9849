"""The CPU's kernel for decode and verify rows, as tables.PagedAttention, on the threads torch computes with.

Torch's threads are a team of OpenMP's. Asked directly, it does the tasks of a kernel in 2 µs more than they
take. Threads of our own would have to be woken for each layer, on cores that the team still waits on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch

from ferrum_mlx.backends.torch.cpu_kernel import ARGUMENTS, PIECE, merge, worker
from ferrum_mlx.backends.torch.tables import How, RowTables
from ferrum_mlx.errors import FerrumError

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
    """What layers have in common that attend alike in a step.

    `given` lies at `address`, and what it points to belongs to `held`.
    """

    work: int
    given: np.ndarray
    address: int
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
        shapes = queries.shape, keys.shape, values.shape
        kind: Hashable = how.scale, how.window, how.softcap, shapes, keys.dtype
        plan = tables.made.get(kind)
        if plan is None:
            _check(queries, keys, values)
            plan = tables.made[kind] = _planned(queries, keys, values, tables, how)
        queries = queries.contiguous()
        given = plan.given
        given["next"] = given["done"] = 0
        given["queries"], given["keys"], given["values"] = (
            tensor.data_ptr() for tensor in (queries, keys, values)
        )
        self._team(plan.work, plan.address)
        if given["done"] != given["count"]:  # what compiled code raises goes no further
            raise FerrumError("a step's attention was not computed", next_step="free some memory")
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
    given = np.zeros((), ARGUMENTS)
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
    work = worker(head_dim, value_dim, group, keys.dtype == torch.float16).address
    ends = np.cumsum(lengths)
    return _Plan(work, given, given.ctypes.data, sums, stats, starts, counts, ends, held)
