"""The MLX executor: one packed forward over an mlx-lm model and paged pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.mlx import selfcheck
from ferrum_mlx.backends.mlx.attention import PagedLayer, PagedStorage, PoolStorage, StepContext, install
from ferrum_mlx.backends.mlx.device import parameter_arrays
from ferrum_mlx.backends.mlx.host_attention import HostStorage
from ferrum_mlx.backends.mlx.host_layers import use_host_layers
from ferrum_mlx.backends.mlx.layers import LayerKV, RowSelector, group_layers, inspect_layers
from ferrum_mlx.backends.mlx.sampler import sample
from ferrum_mlx.backends.mlx.step import Step
from ferrum_mlx.batch import ItemResult, LogitsPolicy, UnifiedBatch
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.executor import Pending
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sizing import plan_pools
from ferrum_mlx.model_info import Capabilities, ExecutorState, MemoryRequirements, ModelInfo


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
        layers, vocab_size = inspect_layers(model, info.model_type)
        kv_heads, head_dim = layers[0].key_shape
        self.info = replace(info, vocab_size=vocab_size, num_kv_heads=kv_heads, head_dim=head_dim)
        self._model, self._host, self._exact = model, host, config.numerics == "exact"
        groups = group_layers(layers)
        max_len = _context(info, config)
        plan = plan_pools(groups, config, max_len, free_memory)
        super().__init__(
            KVManager(groups, plan.num_blocks, config.block_size, config.max_num_batched_tokens),
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
        self._layers = [
            PagedLayer(self._context, self._storage(group_of[i], layer), layer.window)
            for i, layer in enumerate(layers)
        ]
        if host:
            use_host_layers(model, self._exact)

    def _storage(self, group: int, layer: LayerKV) -> PagedStorage:
        num_slots = (self.kv.num_blocks[group] + 1) * self.kv.block_size  # block 0 is the null block
        if self._host and layer.dtype == mx.float32:
            return HostStorage(group, num_slots, layer.key_shape, layer.value_shape, self._exact)
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
        self._selector.remove()
        self._model = nn.Module()  # drops the weights
        self._state = ExecutorState.SHUTDOWN
        mx.clear_cache()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            prefill_while_decoding=self._max_tokens,
            prefix_cache=False,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=tuple(f"window {g.window}" if g.window else "full" for g in self.kv.groups),
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
        host_pools = sum(s.nbytes for layer in self._layers if isinstance(s := layer.storage, HostStorage))
        return mx.get_active_memory() + host_pools, mx.get_peak_memory() + host_pools

    def _recover(self) -> None:
        self._context.step = self._context.positions = self._selector.rows = None
        for layer in self._layers:
            layer.storage.reset()

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
        logits: mx.array = self._model(mx.array(step.token_ids)[:, None], cache=self._layers)[:, 0]
        self._context.step = self._context.positions = self._selector.rows = None
        if len(logits) != len(step.rows):
            logits = logits[mx.array(step.rows)]
        return logits


def _context(info: ModelInfo, config: EngineConfig) -> int:
    """The longest sequence in tokens; a model's own limit of 0 is unknown."""
    limit = info.max_sequence_length
    if config.max_model_len is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if 0 < limit < config.max_model_len:
        raise UsageError(
            f"--max-model-len is {config.max_model_len:,}", f"allowed: at most {limit:,}, the model's own"
        )
    return config.max_model_len
