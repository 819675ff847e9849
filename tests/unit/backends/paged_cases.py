"""Calls of a paged kernel, what they should give, and small models through it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from ferrum_mlx.backends.torch import zoo
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.reference import generate as library_generate
from ferrum_mlx.backends.torch.tables import MAX_ROWS, How, PagedAttention, RowTables, TableStorage
from ferrum_mlx.batch import UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.config import EngineConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Case = tuple[dict[str, Any], How]


def make_case(
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    groups: Sequence[int] = (1, 2, 3, 7),
    dims: Sequence[int] = (8, 64, 80, 128, 192),
    value_dims: Sequence[int] = (20,),
) -> Case:
    """Random sequences, shapes and features: the tensors of a call, and how they attend."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice(groups)
    key_dim = rng.choice(dims)
    value_dim = rng.choice([key_dim, key_dim, *value_dims])
    block_size, most = rng.choice([1, 4, 13, 16]), rng.choice([1, 1, 9, MAX_ROWS])
    counts = [rng.randint(1, most) for _ in range(rng.randint(1, 4))]
    contexts = [count + rng.choice([0, rng.randint(0, 30), rng.randint(0, 250)]) for count in counts]
    if rng.random() < 0.3:  # a padding row
        counts.append(1)
        contexts.append(0)
    lengths = [-(-context // block_size) for context in contexts]
    blocks = 1 + torch.randperm(sum(lengths) + 3, generator=noise)
    tables = RowTables(
        *(torch.tensor(x, device=DEVICE) for x in (before(counts), counts, contexts, before(lengths))),
        blocks.to(DEVICE),
        max_rows=1 if most == 1 else MAX_ROWS,
        width=max(lengths) + rng.randint(0, 2),
        block_size=block_size,
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(DEVICE, dtype)

    heads, slots = kv_heads * group, (len(blocks) + 1) * block_size
    given = {
        "queries": normal(heads, sum(counts), key_dim).transpose(0, 1),  # as models hand them over
        "keys": normal(slots, kv_heads, key_dim),
        "values": normal(slots, kv_heads, value_dim),
        "tables": tables,
        "out": torch.full((sum(counts) + 1, heads, value_dim), 7.0, device=DEVICE, dtype=dtype),
    }
    how = How(
        key_dim**-0.5,
        rng.choice([None, None, 1, 8, 50]),
        rng.choice([None, None, 2.0]),
        rng.choice([None, normal(heads)]),
    )
    return given, how


def before(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def outcome(function: Any, case: Case, **changed: Any) -> torch.Tensor:
    given, how = case
    out = given["out"].clone()
    function(**{**given, "how": how, **changed, "out": out})
    return out.float()


def by_rows(queries: Any, keys: Any, values: Any, tables: RowTables, out: Any, how: How) -> None:
    """A row at a time, a head at a time, in float64."""
    size = tables.block_size
    parts = (tables.starts, tables.counts, tables.contexts, tables.firsts)
    for start, count, context, first in zip(*(part.tolist() for part in parts), strict=True):
        for row in range(count):
            position = context - count + row
            seen = range(0 if how.window is None else max(0, position - how.window + 1), position + 1)
            slots = [int(tables.blocks[first + p // size]) * size + p % size for p in seen]
            for head in range(queries.shape[1]):
                own = head // (queries.shape[1] // keys.shape[1])
                scores = keys[slots, own].double() @ queries[start + row, head].double() * how.scale
                if how.softcap is not None:
                    scores = how.softcap * torch.tanh(scores / how.softcap)
                if how.sinks is not None:
                    scores = torch.cat([scores, how.sinks[head].double()[None]])
                weights = torch.softmax(scores, 0)[: len(slots)]
                out[start + row, head] = (weights @ values[slots, own].double()).to(out.dtype)


def ids_through(kernel: PagedAttention, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Two sequences of a small model in a batch, drafts verified in between; and the library's own ids."""
    config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=2)
    executor = TorchExecutor(zoo.build(name).to(DEVICE), zoo.info(name), config, free_memory=2**24)
    executor.prepare_startup()
    for table in executor._packed.storages:
        assert isinstance(table, TableStorage)
        table.kernel = kernel
    prompts = [[5, 80, 113, 7, 7, 150, 31, 64, 9, 2, 77], [18, 140]]
    count = 6
    wanted = [library_generate(executor, prompt, count)[0] for prompt in prompts]
    got, caches = [[] for _ in prompts], []
    for prompt in prompts:
        admission = executor.try_admit_prefill(f"r{len(caches)}", prompt, use_prefix=False)
        assert isinstance(admission, Admitted)
        caches.append(admission.cache_id)
    feeds, starts = [list(prompt) for prompt in prompts], [0, 0]
    while len(got[0]) < count:
        items = []
        for cache, feed, start, ids, want in zip(caches, feeds, starts, got, wanted, strict=True):
            drafts = want[len(ids) : len(ids) + 3] if len(ids) == 2 else []  # right ones
            tokens = (*feed, *drafts)
            items.append(UnifiedItem(cache_id=cache, q_tokens=tokens, pos_offset=start, verify=bool(drafts)))
        executor.reserve_kv_slots([KvSlotRequest(i.cache_id, i.pos_offset + len(i.q_tokens)) for i in items])
        for i, result in enumerate(executor.batch_prefill(items)):
            got[i] += result.token_ids
            starts[i] += len(items[i].q_tokens)
            feeds[i] = [result.token_ids[-1]]
    return [ids[:count] for ids in got], wanted
