"""A few moves on an executor, in the order the contract asks for."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_mlx.batch import ItemResult, LogitsPolicy, RowSampling, UnifiedItem
from ferrum_mlx.capacity import Admitted, CacheCompletion, KvSlotRequest
from ferrum_mlx.executor import ModelExecutor

_names = iter(range(10**9))


def admit(
    executor: ModelExecutor,
    prompt: Sequence[int],
    name: str = "",
    *,
    use_prefix: bool = False,
    adapter: str = "",
) -> int:
    """Computes every token, unless told to share prefixes."""
    name = name or f"r{next(_names)}"
    admission = executor.try_admit_prefill(name, prompt, use_prefix=use_prefix, adapter=adapter)
    assert isinstance(admission, Admitted), admission
    return admission.cache_id


def item(cache_id: int, tokens: Sequence[int], start: int, **fields: object) -> UnifiedItem:
    return UnifiedItem(cache_id=cache_id, q_tokens=tuple(tokens), pos_offset=start, **fields)  # type: ignore[arg-type]


def run(executor: ModelExecutor, *items: UnifiedItem) -> list[ItemResult]:
    executor.reserve_kv_slots([KvSlotRequest(i.cache_id, i.pos_offset + len(i.q_tokens)) for i in items])
    return executor.batch_prefill(items)


def generate(
    executor: ModelExecutor,
    prompt: Sequence[int],
    count: int,
    chunk: int = 1000,
    sampling: RowSampling | None = None,
    use_prefix: bool = False,
) -> list[int]:
    """Prefill in chunks, decode one at a time, free; returns `count` ids."""
    sampling = sampling or RowSampling()
    admission = executor.try_admit_prefill("generate", prompt, use_prefix=use_prefix)
    assert isinstance(admission, Admitted), admission
    cache_id = admission.cache_id
    known, start, output = list(prompt), admission.num_cached_tokens, []
    while len(output) < count:
        end = min(start + chunk, len(known))
        final = end == len(known)
        result = run(
            executor,
            item(cache_id, known[start:end], start, is_final_chunk=final, sampling=sampling.at(len(output))),
        )[0]
        start = end
        output += result.token_ids
        known += result.token_ids
    executor.complete_cache(CacheCompletion("generate", cache_id, len(prompt), len(output)))
    return output


FULL = LogitsPolicy.FULL
