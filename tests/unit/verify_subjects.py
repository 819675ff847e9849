"""Tiny models to verify, and ways to break each of them that a check must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn
import numpy as np

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.verify.runs import Library, Subject

from ..contract.conftest import BACKENDS, tiny_config

SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}


def subject(backend: str, *, blocks: int = 400, library: Library | None = None, **settings: Any) -> Subject:
    config = tiny_config(**(SETTINGS | settings))
    executor = BACKENDS[backend](config, blocks)
    if isinstance(executor, MLXExecutor):
        quieten(executor.model)
    return over(executor, config, backend.split("-")[0], library)


def quieten(model: nn.Module) -> None:
    """Logits in the thousands, as of this model, are rounded by more than the rule allows."""
    norm = model.model.norm
    norm.weight *= 0.02
    if hasattr(norm, "host_weight"):
        norm.host_weight = np.array(norm.weight)


def stateful(**settings: Any) -> Subject:
    config = tiny_config(**(SETTINGS | {"kv_memory": 10_000} | settings))
    return over(FakeExecutor(config, stateful=True, num_states=40), config, "fake")


def over(
    executor: ModelExecutor, config: EngineConfig, backend: str, library: Library | None = None
) -> Subject:
    executor.prepare_startup()
    codec = FakeCodec()
    engine = Engine(executor, codec, config, backend=backend, backend_reason="a test")
    return Subject(engine, codec, config, library)


def paged(broken: Subject) -> PagedExecutor:
    assert isinstance(broken.executor, PagedExecutor)
    return broken.executor


def corrupt_block_tables(broken: Subject) -> None:
    """The first block is read from, and written to, the second's place."""
    kv = paged(broken).kv
    true = kv.slot_mapping

    def shifted(cache_id: int, group: int, start: int, end: int) -> np.ndarray:
        slots = true(cache_id, group, start, end)
        if start == 0 and end > 8:
            slots[:4] = slots[4:8]
        return slots

    kv.slot_mapping = shifted  # type: ignore[method-assign]


def find_wrong_blocks(broken: Subject) -> None:
    """Every key finds the block that the first one asked for is in."""
    (pool,) = paged(broken).kv._pools
    true, known = pool.find, []

    def wrong(key: Any) -> int | None:
        if (block := true(key)) is not None:
            known.append(block)
        return None if block is None else known[0]

    pool.find = wrong  # type: ignore[method-assign]


def let_neighbours_add_noise(broken: Subject) -> None:
    executor = paged(broken)
    launch = executor._launch

    def noisy(batch: UnifiedBatch) -> Any:
        count = len(batch.items)
        items = [replace(i, sampling=replace(i.sampling, seed=i.sampling.seed + count)) for i in batch.items]
        return launch(UnifiedBatch(tuple(items)))

    executor._launch = noisy  # type: ignore[method-assign]


def change_results(broken: Subject, change: Callable[[UnifiedBatch, Sequence[Any]], list[Any]]) -> None:
    executor = paged(broken)
    launch = executor._launch

    class Changed:
        def __init__(self, batch: UnifiedBatch) -> None:
            self.batch, self.pending = batch, launch(batch)

        def result(self) -> list[Any]:
            return change(self.batch, self.pending.result())

    executor._launch = Changed  # type: ignore[method-assign,assignment]


def misreport_logprobs(broken: Subject) -> None:
    def change(batch: UnifiedBatch, results: Sequence[Any]) -> list[Any]:
        off = lambda found: tuple(replace(t, logprob=t.logprob - 0.1) for t in found)  # noqa: E731
        return [replace(result, logprobs=off(result.logprobs)) for result in results]

    change_results(broken, change)


def let_batches_change_logits(broken: Subject) -> None:
    """By more than rounding, and no id with them."""

    def change(batch: UnifiedBatch, results: Sequence[Any]) -> list[Any]:
        if len(results) == 1:
            return list(results)
        return [replace(r, logits=None if r.logits is None else r.logits + 0.01) for r in results]

    change_results(broken, change)


def accept_every_draft(broken: Subject) -> None:
    def change(batch: UnifiedBatch, results: Sequence[Any]) -> list[Any]:
        pairs = zip(batch.items, results, strict=True)
        return [
            replace(r, token_ids=(*item.q_tokens[1:], r.token_ids[-1])) if item.verify else r
            for item, r in pairs
        ]

    change_results(broken, change)


def forget_snapshots(broken: Subject) -> None:
    """A state that should be a snapshot's is the initial one."""
    states = paged(broken).kv._states
    assert states is not None
    copy = states._copy
    states._copy = lambda source, target: copy(None, target)


BROKEN = {
    corrupt_block_tables: "paged = dense",
    find_wrong_blocks: "prefix hit = miss",
    let_neighbours_add_noise: "seed alone = beside others",
    misreport_logprobs: "logprobs = the logits'",
    let_batches_change_logits: "batched = alone",
    accept_every_draft: "speculation = plain",
}
