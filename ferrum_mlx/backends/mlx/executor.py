"""The MLX executor: one packed forward over an mlx-lm model and paged pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ferrum_mlx.adapters import base_note, read_adapters
from ferrum_mlx.backends import selfcheck
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.mlx.adapters import AdaptedLayers
from ferrum_mlx.backends.mlx.attention import StepContext, install
from ferrum_mlx.backends.mlx.device import PREFILL_WHILE_DECODING, memory_limit, parameter_arrays
from ferrum_mlx.backends.mlx.halves import Halves, Parts
from ferrum_mlx.backends.mlx.host_attention import HostStorage
from ferrum_mlx.backends.mlx.host_layers import use_host_layers
from ferrum_mlx.backends.mlx.kernels.check import switch_on
from ferrum_mlx.backends.mlx.kernels.launch import MAX_ROWS, MetalAttention
from ferrum_mlx.backends.mlx.kernels.tables import TableStorage
from ferrum_mlx.backends.mlx.layers import Inspection, LayerKV, LayerState, group_layers, inspect_layers
from ferrum_mlx.backends.mlx.packed import PackedModel
from ferrum_mlx.backends.mlx.pending import Sampled, choose, token_ids
from ferrum_mlx.backends.mlx.pools import PagedStorage, PoolStorage
from ferrum_mlx.backends.mlx.quantized import QuantizedStorage, round_what_is_kept
from ferrum_mlx.backends.mlx.state import StateStore
from ferrum_mlx.backends.step import Step
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.errors import UnsupportedModelError, UsageError
from ferrum_mlx.executor import Pending
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.precision import name_of
from ferrum_mlx.kv.sizing import plan_pools
from ferrum_mlx.model_info import Capabilities, ExecutorState, MemoryRequirements, ModelInfo, StateSpec


class MLXExecutor(PagedExecutor):
    """`free_memory` is in bytes, measured after the weights were loaded; `share` of it is for this model."""

    def __init__(
        self,
        model: nn.Module,
        info: ModelInfo,
        config: EngineConfig,
        *,
        host: bool,
        free_memory: int,
        share: float = 1.0,
    ) -> None:
        install()
        inspection = inspect_layers(model, info.model_type, config.kv_bits)
        layers, states = inspection.kv, inspection.states
        self.info = _as_found(info, inspection, config.kv_bits)
        self._model, self._host, self._exact = model, host, config.numerics == "exact"
        self._kv_bits = config.kv_bits
        self._state_specs = tuple(_state_spec(*state) for state in states)
        groups = group_layers(layers)
        max_len = _context(info, config)
        adapters, context = read_adapters(config.adapters), StepContext()
        if host:
            use_host_layers(model, self._exact)
        dtype = getattr(mx, info.dtype)
        self._adapted = AdaptedLayers(model, adapters, context, dtype, self._exact)
        free_memory = max(0, free_memory - self._adapted.nbytes)
        state_bytes = sum(spec.num_bytes for spec in self._state_specs)
        plan = plan_pools(groups, config, max_len, free_memory, state_bytes, share=share)
        store = StateStore([len(state.shapes) for _, state in states])
        kv = KVManager(
            groups,
            plan.num_blocks,
            config.block_size,
            config.max_num_batched_tokens,
            prefix_cache=config.prefix_cache,
            salt=(info.model_id, info.dtype, config.numerics, self.info.kv_dtype),
            num_states=plan.num_states,
            copy_state=store.copy if states else None,
        )
        super().__init__(
            kv,
            max_model_len=max_len,
            max_seqs=max(2, config.max_num_seqs),  # the load-time check runs two
            max_tokens=config.max_num_batched_tokens,
            adapters={adapter.name: adapter.digest for adapter in adapters},
        )
        self.notes = [*plan.notes, *filter(None, (base_note(a, info.model_id) for a in adapters))]
        self._latest: Sampled | None = None  # the latest launch
        self._halves, self._ahead = Halves(), False
        self._parameter_bytes = sum(array.nbytes for array in parameter_arrays(model)) + self._adapted.nbytes
        self._state_bytes, self._state_slots = state_bytes, plan.num_states
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._packed = PackedModel(
            model, context, inspection, store, lambda i, layer: self._storage(group_of[i], layer)
        )

    def _storage(self, group: int, layer: LayerKV) -> PagedStorage:
        num_slots = (self.kv.num_blocks[group] + 1) * self.kv.block_size  # block 0 is the null block
        if self._host and layer.dtype == mx.float32:
            return HostStorage(group, num_slots, layer.key_shape, layer.value_shape, self._exact, layer.bits)
        shapes = layer.key_shape, layer.value_shape
        if layer.bits is not None:
            return QuantizedStorage(group, num_slots, *shapes, layer.dtype, layer.bits)
        kind = PoolStorage if self._host else TableStorage
        return kind(group, num_slots, *shapes, layer.dtype)

    def prepare_startup(self) -> None:
        """Take the first route that computes what the model computes alone.

        Raises:
            UnsupportedModelError: none does.
        """
        self._take_route()
        # numpy's products on the host are computed as a step is built: there is nothing to run ahead of
        self._ahead = not self._host and not self._state_specs and self._halves.cut
        if not self._host and not self._ahead:
            self._packed.off.append(
                "one step ahead: layers keep a state, or compute with keys and values themselves"
            )
        if mx.default_device() == mx.gpu and not self._host:
            self.speed_up(MetalAttention)
        if self._host and self._exact and not selfcheck.is_bitwise(self):
            self.notes.append(
                f"--numerics exact does not hold to the bit for {self.info.model_type}: its own layers "
                "round a token by the length of the chunk it is in"
            )
        self.kv.forget_prefixes()  # of the check's own prompts
        self._state = ExecutorState.READY

    def speed_up(self, make_kernel: Callable[[], MetalAttention]) -> None:
        """Attend through a kernel in the layers in which it proves right here."""
        check = partial(selfcheck.check_all, self, self._packed.storages)
        reasons = switch_on(self._packed.storages, self.kv.block_size, make_kernel, check)
        self._packed.off += [f"paged kernel: {reason}" for reason in reasons]

    def _take_route(self) -> None:
        failure: UnsupportedModelError | None = None
        for route in self._packed.routes:
            self._packed.take(route)
            try:
                selfcheck.check_all(self, self._packed.storages)
            except UnsupportedModelError as error:
                failure = error
            else:
                return
        assert failure is not None
        raise failure

    def shutdown(self) -> None:
        self.kv.capacity.close()
        self._packed.release()
        self._adapted.remove()
        self._latest = None
        self._model = nn.Module()  # drops the weights
        self._state = ExecutorState.SHUTDOWN
        mx.clear_cache()

    def recurrent_state_spec(self) -> tuple[StateSpec, ...] | None:
        return self._state_specs or None

    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            prefill_while_decoding=PREFILL_WHILE_DECODING["cpu" if self._host else "gpu"],
            prefix_cache=self.kv.prefix.enabled,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=(
                *(f"window {g.window}" if g.window else "full" for g in self.kv.groups),
                *(["state"] if self._state_specs else []),
            ),
            speculative_decoding=not self._state_specs,  # a state cannot be rolled back
            one_step_ahead=self._ahead,
            tensor_parallel=False,
            dtypes=(self.info.dtype,),
            devices=(self.info.device,),
            off=tuple(self._packed.off),
            max_verify_rows=None if self._host else self._verify_rows(),
        )

    def _verify_rows(self) -> int:
        """MLX's fused attention for few queries: at most 8 rows, and 32 of them by query heads a KV head."""
        if all(isinstance(s, TableStorage) and s.kernel is not None for s in self._packed.storages):
            return MAX_ROWS
        group = self.info.num_heads // max(1, self.info.num_kv_heads)
        return max(2, min(8, 32 // max(1, group)))

    def memory(self) -> MemoryRequirements:
        pools = sum(storage.nbytes for storage in self._packed.storages)
        return MemoryRequirements(
            parameter_bytes=self._parameter_bytes,
            kv_bytes_per_token=sum(group.bytes_per_token for group in self.kv.groups),
            kv_tokens=self.kv.tokens_held,
            kv_pool_bytes=pools + self._state_slots * self._state_bytes,
            smallest_pool_bytes=min(
                (size for s in self._packed.storages for size in s.pool_bytes() if size), default=0
            ),
            state_bytes=self._state_bytes,
            state_slots=self._state_slots,
        )

    def forward(self, token_ids: Sequence[int], *, adapter: str = "", exact_kv: bool = False) -> np.ndarray:
        caches = self.native_caches(exact_kv=exact_kv)
        with self._packed.context.through(self.adapter_number(adapter)):
            logits = self._model(mx.array([list(token_ids)]), cache=caches)[0]
        return np.array(logits.astype(mx.float32))

    def native_caches(self, *, exact_kv: bool = False) -> list[Any]:
        """mlx-lm's own for one sequence; they round what they keep as our pools do."""
        caches: list[Any] = make_prompt_cache(self._model)
        if self._kv_bits is not None and not exact_kv:
            round_what_is_kept(caches, self._kv_bits)
        return caches

    def _memory_in_use(self) -> tuple[int, int]:
        host_pools = sum(s.nbytes for s in self._packed.storages if isinstance(s, HostStorage))
        return mx.get_active_memory() + host_pools, mx.get_peak_memory() + host_pools

    def _memory_limit(self) -> int:
        return memory_limit(host=self._host)

    def reset_peak_memory(self) -> None:
        mx.reset_peak_memory()

    @property
    def model(self) -> nn.Module:
        """The library's own, whose native caches work as ever."""
        return self._model

    def _recover(self) -> None:
        self._packed.recover()
        self._halves.reset()

    def _launch(self, batch: UnifiedBatch) -> Pending:
        step = Step(batch, self.kv, self._adapters)
        logits, middle = self._packed.forward(step, token_ids(step, self._latest))
        pending = choose(step, logits, self._halves.landed)
        self._latest = pending.for_the_next
        first, rest = self._packed.changed()
        self._halves.start(Parts(middle, first, [*pending.arrays, *rest]))
        return pending


def _as_found(info: ModelInfo, inspection: Inspection, kv_bits: int | None) -> ModelInfo:
    """With what the model's layers were seen to use."""
    kv_heads, head_dim = inspection.kv[0].key_shape if inspection.kv else (0, 0)
    return replace(
        info,
        vocab_size=inspection.vocab_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_dtype=name_of(kv_bits) if inspection.kv else "",
    )


def _state_spec(layer: int, state: LayerState) -> StateSpec:
    dtypes = dict.fromkeys(str(dtype).removeprefix("mlx.core.") for dtype in state.dtypes if dtype)
    return StateSpec(
        layer=layer,
        shapes=tuple(shape for shape in state.shapes if shape is not None),
        dtype=", ".join(dtypes),
        num_bytes=state.num_bytes,
    )


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
