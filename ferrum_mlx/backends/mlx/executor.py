"""The MLX executor: one packed forward over an mlx-lm model and paged pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.mlx import selfcheck
from ferrum_mlx.backends.mlx.attention import PagedLayer, PagedStorage, PoolStorage, StepContext, install
from ferrum_mlx.backends.mlx.device import parameter_arrays
from ferrum_mlx.backends.mlx.host import HostStorage, use_host_matmul
from ferrum_mlx.backends.mlx.layers import LayerKV, RowSelector, group_layers, inspect_layers
from ferrum_mlx.backends.mlx.sampler import sample
from ferrum_mlx.backends.mlx.step import Step
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.executor import (
    Capabilities,
    ExecutorState,
    ItemResult,
    LogitsPolicy,
    MemoryRequirements,
    ModelInfo,
    Pending,
    UnifiedBatch,
)
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sizing import plan_pool


@dataclass(frozen=True, slots=True)
class _Pending:
    """tokens [R] and logits [R, vocab] are on the device until result() is called."""

    step: Step
    tokens: mx.array
    logits: mx.array

    def result(self) -> list[ItemResult]:
        tokens = np.array(self.tokens).tolist()
        results: list[ItemResult] = []
        start = 0
        for item in self.step.items:
            end = start + item.num_rows_out
            logits = None
            if item.logits is LogitsPolicy.FULL and end > start:
                logits = np.array(self.logits[start:end].astype(mx.float32))
            results.append(ItemResult(item.cache_id, tuple(tokens[start:end]), logits))
            start = end
        return self.step.in_batch_order(results)


class MLXExecutor(PagedExecutor):
    """`free_memory` is in bytes, measured after the weights were loaded."""

    def __init__(
        self, model: nn.Module, info: ModelInfo, config: EngineConfig, *, host: bool, free_memory: int
    ) -> None:
        install()
        self.info = info
        self._model, self._host = model, host
        layers = inspect_layers(model, info.model_type)
        groups = group_layers(layers)
        max_len = config.max_model_len or min(info.max_sequence_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        plan = plan_pool(groups, config, max_len, free_memory)
        super().__init__(
            KVManager(groups, plan.num_blocks, config.block_size),
            max_model_len=max_len,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
        )
        self.notes = list(plan.notes)
        self._off: list[str] = []
        self._parameter_bytes = sum(array.nbytes for array in parameter_arrays(model))
        self._context = StepContext()
        self._selector = RowSelector(model)
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        num_slots = (plan.num_blocks + 1) * config.block_size  # block 0 is the null block
        self._layers = [
            PagedLayer(self._context, self._storage(group_of[i], num_slots, layer), layer.window)
            for i, layer in enumerate(layers)
        ]
        if host:
            use_host_matmul(model, exact=config.numerics == "exact")

    def _storage(self, group: int, num_slots: int, layer: LayerKV) -> PagedStorage:
        if self._host and layer.dtype == mx.float32:
            return HostStorage(group, num_slots, layer.key_shape, layer.value_shape)
        return PoolStorage(group, num_slots, layer.key_shape, layer.value_shape, layer.dtype)

    def prepare_startup(self) -> None:
        selfcheck.check(self)
        if self._selector.backbone is None:
            self._off.append(
                "row selection before the output head: no part of the model is known to be its backbone"
            )
        self._state = ExecutorState.READY

    def shutdown(self) -> None:
        self._layers.clear()
        self._state = ExecutorState.SHUTDOWN
        mx.clear_cache()

    def capabilities(self) -> Capabilities:
        windows = sorted({group.window for group in self.kv.groups if group.window})
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=("full", *(f"window {w}" for w in windows)),
            speculative_decoding=True,
            tensor_parallel=False,
            dtypes=(self.info.dtype,),
            devices=(self.info.device,),
            off=tuple(self._off),
        )

    def memory(self) -> MemoryRequirements:
        return MemoryRequirements(
            parameter_bytes=self._parameter_bytes,
            kv_bytes_per_token=sum(group.bytes_per_token for group in self.kv.groups),
            kv_pool_bytes=sum(layer.storage.nbytes for layer in self._layers),
        )

    def forward(self, token_ids: Sequence[int]) -> np.ndarray:
        logits = self._model(mx.array([list(token_ids)]), cache=make_prompt_cache(self._model))[0]
        return np.array(logits.astype(mx.float32))

    def _memory_in_use(self) -> tuple[int, int]:
        pools = sum(layer.storage.nbytes for layer in self._layers) if self._host else 0
        return mx.get_active_memory() + pools, mx.get_peak_memory() + pools

    def _launch(self, batch: UnifiedBatch) -> Pending:
        step = Step(batch, self.kv)
        logits = self._logits(step)
        sampling = [row for item in step.items for row in item.row_sampling]
        tokens = sample(logits, sampling) if sampling else mx.zeros((0,), mx.uint32)
        mx.async_eval(tokens, *(array for layer in self._layers for array in layer.storage.arrays()))
        return _Pending(step, tokens, logits)

    def _logits(self, step: Step) -> mx.array:
        """[R, vocab]; when R is 0 the output head is not run."""
        self._context.step, self._context.positions = step, mx.array(step.positions)
        if len(step.rows) < step.num_tokens:
            self._selector.rows = mx.array(step.rows)
        try:
            logits: mx.array = self._model(mx.array(step.token_ids)[:, None], cache=self._layers)[:, 0]
        finally:
            self._context.step = self._context.positions = self._selector.rows = None
        if len(logits) != len(step.rows):
            logits = logits[mx.array(step.rows)]
        return logits
