"""Whether a paged kernel computes, on this device and for this model, what its plain form does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrum_mlx.backends.torch.device import without_cpu_kernel
from ferrum_mlx.backends.torch.pools import PagedStorage, new_pool
from ferrum_mlx.backends.torch.tables import MAX_ROWS, PagedAttention, RowTables, TableStorage, attend
from ferrum_mlx.errors import BackendUnavailableError, FerrumError, one_line

# Largest difference, values being around 1: of rounding an output and the weights behind it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
BLOCK_SIZE = 16
CONTEXTS = (1, BLOCK_SIZE, 5 * BLOCK_SIZE + 3, 1100, 0)  # one token, a full block, several splits, padding


def cpu_kernel() -> PagedAttention:
    """What numba compiles.

    Raises:
        BackendUnavailableError: it cannot.
    """
    if reason := without_cpu_kernel():
        raise BackendUnavailableError(reason)
    from ferrum_mlx.backends.torch.cpu_attention import CPUAttention, team

    return CPUAttention(team(torch.get_num_threads()))


def triton_kernel(device: torch.device) -> PagedAttention:
    """The Triton kernel, with enough programs for every multiprocessor of a CUDA device."""
    from ferrum_mlx.backends.torch.paged_kernel import TritonAttention

    return TritonAttention(2 * torch.cuda.get_device_properties(device).multi_processor_count)


def switch_on(
    storages: Sequence[PagedStorage],
    make: Callable[[], PagedAttention],
    check_model: Callable[[], None],
) -> str | None:
    """Give a kernel to all storages, or to none: why not, as text. They have attended before.

    Args:
        check_model: raises where the model's logits are not what they are alone.
    """
    tables = [storage for storage in storages if isinstance(storage, TableStorage)]
    if len(tables) < len(storages):
        return "exact numerics take a route of their own"
    if any(storage.quantized for storage in tables):
        return "it reads K and V in the model's own dtype, not in 8 bits (--kv-bits 8)"
    try:
        kernel = make()
        for storage in {_kind(storage): storage for storage in tables}.values():
            if reason := difference(kernel, storage):
                return reason
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except BackendUnavailableError as error:
        return str(error)
    except Exception as error:  # a compiler, a driver or a device that cannot
        return f"it does not run on this device: {one_line(error)}"
    for storage in tables:
        storage.kernel = kernel
    try:
        check_model()
    except FerrumError as error:
        for storage in tables:
            storage.kernel = None
        return f"through it, {error}"
    return None


def _kind(storage: TableStorage) -> object:
    assert storage.asked is not None
    heads, how = storage.asked
    shapes = storage.keys.shape[1:], storage.values.shape[1:]
    return shapes, heads, how.scale, how.window, how.softcap, how.sinks is not None


@torch.inference_mode()
def difference(
    kernel: PagedAttention, storage: TableStorage, contexts: Sequence[int] = CONTEXTS
) -> str | None:
    """Decode and verify rows as the storage's layer asks for them, over random K and V; None is right."""
    assert storage.asked is not None
    heads, how = storage.asked
    for most in (1, MAX_ROWS):
        tables, num_slots = _tables(contexts, most, storage.keys.device)
        rng = torch.Generator(storage.keys.device).manual_seed(0)
        keys, values = (
            new_pool(num_slots, tuple(pool.shape[1:]), pool.dtype, pool.device).normal_(generator=rng)
            for pool in (storage.keys, storage.values)
        )
        rows = int(tables.counts.sum())
        queries = keys.new_empty(rows, heads, keys.shape[2], dtype=storage.dtype).normal_(generator=rng)
        got = queries.new_empty(rows, heads, values.shape[2])
        want = torch.empty_like(got, dtype=torch.float32)
        kernel(queries, keys, values, tables, got, how)
        attend(queries.float(), keys.float(), values.float(), tables, want, how)
        apart = float((got - want).abs().max())
        if not apart <= TOLERANCE[storage.dtype]:  # also refuses NaN
            return f"{most} rows a sequence of {keys.dtype} are off by {apart:.3g} on this device"
    return None


def _tables(contexts: Sequence[int], most: int, device: torch.device) -> tuple[RowTables, int]:
    """Sequences with up to `most` rows each, their blocks shuffled; slots of their pool."""
    counts = [max(1, min(most, context)) for context in contexts]
    lengths = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = 1 + torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0))

    def starts(sizes: list[int]) -> torch.Tensor:
        return torch.tensor([sum(sizes[:i]) for i in range(len(sizes))], device=device)

    tables = RowTables(
        starts(counts),
        torch.tensor(counts, device=device),
        torch.tensor(contexts, device=device),
        starts(lengths),
        blocks.to(device),
        max_rows=most,
        width=max(lengths),
        block_size=BLOCK_SIZE,
    )
    return tables, (1 + sum(lengths)) * BLOCK_SIZE
