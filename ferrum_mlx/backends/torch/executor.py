"""The torch executor: one packed forward over a transformers model and paged pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ferrum_mlx.adapters import base_note, read_adapters
from ferrum_mlx.backends import selfcheck
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch import weights
from ferrum_mlx.backends.torch.adapters import AdaptedLayers
from ferrum_mlx.backends.torch.capture import Capture, CUDACapture
from ferrum_mlx.backends.torch.exact import ExactStorage
from ferrum_mlx.backends.torch.graphs import DecodeBuffers, DecodeGraphs
from ferrum_mlx.backends.torch.layers import LayerKV, group_layers, inspect_layers, rope_ceiling
from ferrum_mlx.backends.torch.packed import PackedModel
from ferrum_mlx.backends.torch.paged_check import cpu_kernel, switch_on, triton_kernel
from ferrum_mlx.backends.torch.pending import Sampled, choose, token_ids
from ferrum_mlx.backends.torch.quantized import check_bits
from ferrum_mlx.backends.torch.tables import PagedAttention, TableStorage
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.config import DEFAULT_CONTEXT, DRAFT_TOKENS, EngineConfig
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.executor import Pending
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.precision import name_of
from ferrum_mlx.kv.sizing import plan_pools
from ferrum_mlx.model_info import Capabilities, ExecutorState, MemoryRequirements, ModelInfo

_KERNEL = "paged kernel: "


class TorchExecutor(PagedExecutor):
    """`free_memory` is in bytes, measured after the weights were loaded; `share` of it is for this model.

    `half`: pools may keep float16, where that pays.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        config: EngineConfig,
        *,
        free_memory: int,
        share: float = 1.0,
        half: bool = True,
    ) -> None:
        check_bits(config.kv_bits)
        model.requires_grad_(False)
        max_len, self.notes = _context(model, info, config)
        inspection = inspect_layers(model, info.model_type, max_len, config.kv_bits, half=half)
        kv_heads, head_dim = inspection.layers[0].key_shape
        self.info = replace(
            info,
            vocab_size=inspection.vocab_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            kv_dtype=name_of(config.kv_bits) or _kept_as(inspection.layers),
        )
        self._device = model.device
        self._exact = config.numerics == "exact" and model.device.type == "cpu"
        adapters = read_adapters(config.adapters)
        self.notes += filter(None, (base_note(adapter, info.model_id) for adapter in adapters))
        adapted = AdaptedLayers(model, adapters)
        free_memory = max(0, free_memory - adapted.nbytes)
        groups = group_layers(inspection.layers)
        plan = plan_pools(groups, config, max_len, free_memory, share=share)
        kv = KVManager(
            groups,
            plan.num_blocks,
            config.block_size,
            config.max_num_batched_tokens,
            prefix_cache=config.prefix_cache,
            salt=(info.model_id, info.dtype, info.quantization, config.numerics, self.info.kv_dtype),
        )
        super().__init__(
            kv,
            max_model_len=max_len,
            max_seqs=max(2, config.max_num_seqs),  # the load-time check runs two
            max_tokens=config.max_num_batched_tokens,
            adapters={adapter.name: adapter.digest for adapter in adapters},
        )
        self.notes += plan.notes
        drafts = 0 if config.speculative == "off" else config.draft_tokens or DRAFT_TOKENS
        self._verify_rows = 1 + drafts
        self._latest: Sampled | None = None  # the latest launch
        self._parameter_bytes = weights.nbytes(model) + adapted.nbytes
        group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        kind = ExactStorage if self._exact else TableStorage
        storages = [
            kind(group_of[i], self._num_slots(group_of[i]), layer, model.device)
            for i, layer in enumerate(inspection.layers)
        ]
        rounds = config.kv_bits is not None
        self._packed = PackedModel(model, storages, adapted, exact=self._exact, rounds=rounds)
        self._graphs: DecodeGraphs | None = None

    def _num_slots(self, group: int) -> int:
        return (self.kv.num_blocks[group] + 1) * self.kv.block_size  # block 0 is the null block

    def prepare_startup(self) -> None:
        """See that the paged forward computes what the model computes alone.

        Raises:
            UnsupportedModelError: it does not.
        """
        if self._device.type == "cpu" and not self._exact:
            self._packed.replay_few_rows(
                self._verify_rows
            )  # before the check, which then sees replayed steps
        selfcheck.check_all(self, self._packed.storages)
        if self._device.type == "cpu" and not self._exact:
            self._attend_through(cpu_kernel)
        if self._device.type == "cuda":
            self.speed_up(lambda: triton_kernel(self._device), CUDACapture())
        if self._exact and not selfcheck.is_bitwise(self):
            self.notes.append(
                f"--numerics exact does not hold to the bit for {self.info.model_type}: its own layers "
                "round a token by the length of the chunk it is in"
            )
        self.kv.forget_prefixes()  # the checks' own prompts
        self._state = ExecutorState.READY

    def speed_up(
        self, make_kernel: Callable[[], PagedAttention], capture: Capture, *, compiled: bool = False
    ) -> None:
        """Attend through a kernel and replay captured steps, as far as both prove right here.

        Args:
            compiled: capture what torch.compile makes of the model; it takes its time.
        """
        if compiled:
            self._packed.compile()
        self._attend_through(make_kernel)
        groups, block_size = len(self.kv.groups), self.kv.block_size
        width = -(-min(self.max_model_len, self.kv.max_tokens) // block_size)
        num_blocks = min(self.kv.num_blocks)
        most = min(self._max_seqs, num_blocks)
        buffers = DecodeBuffers(most, groups, width, block_size, self._device)
        graphs = DecodeGraphs(self._packed, buffers, groups, most, capture, compiled=compiled)
        reason = graphs.prepare(num_blocks)
        if reason is None:
            self._graphs = graphs
            try:
                selfcheck.check_all(self, self._packed.storages)  # its last step is one of two decode rows
            except FerrumError as error:
                self._graphs, reason = None, f"through them, {error}"
        if reason is None and self.adapter_names:
            reason = "those with rows of an adapter run as they are"
        if reason:
            self._packed.off.append(f"captured decode steps: {reason}")

    def _attend_through(self, make_kernel: Callable[[], PagedAttention]) -> None:
        """If it proves right here; else why not is told."""
        self._packed.off = [reason for reason in self._packed.off if not reason.startswith(_KERNEL)]
        check = partial(selfcheck.check_all, self, self._packed.storages)
        if reason := switch_on(self._packed.storages, make_kernel, check):
            self._packed.off.append(f"{_KERNEL}{reason}")

    @property
    def half_in_vain(self) -> str:
        """Why nothing reads the float16 that pools keep; "" where something does, or they keep none."""
        reasons = [reason for reason in self._packed.off if reason.startswith(_KERNEL)]
        return reasons[0] if reasons and self.info.kv_dtype == "float16" else ""

    def slow_down(self, *, kernel: bool) -> None:
        """Give up captured steps, and with `kernel` the kernel too: to see what each is worth."""
        self._graphs = None
        for storage in self._packed.storages:
            if kernel and isinstance(storage, TableStorage):
                storage.kernel = None

    def shutdown(self) -> None:
        self.kv.capacity.close()
        self._graphs = None
        self._packed.release()
        self._latest = None
        self._state = ExecutorState.SHUTDOWN
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_batch_size=self._max_seqs,
            max_sequence_length=self.max_model_len,
            prefill_while_decoding=devices.PREFILL_WHILE_DECODING[
                "cpu" if self._device.type == "cpu" else "gpu"
            ],
            prefix_cache=self.kv.prefix.enabled,
            kv_capacity=min(self.max_model_len, self.kv.max_tokens),
            attention_kinds=tuple(f"window {g.window}" if g.window else "full" for g in self.kv.groups),
            speculative_decoding=True,
            one_step_ahead=self._device.type == "cuda",  # elsewhere a step is computed as it is submitted
            tensor_parallel=False,
            dtypes=(self.info.dtype,),
            devices=(self.info.device,),
            off=tuple(self._packed.off),
        )

    def memory(self) -> MemoryRequirements:
        return MemoryRequirements(
            parameter_bytes=self._parameter_bytes,
            kv_bytes_per_token=sum(group.bytes_per_token for group in self.kv.groups),
            kv_tokens=self.kv.tokens_held,
            kv_pool_bytes=sum(storage.nbytes for storage in self._packed.storages),
        )

    def forward(self, token_ids: Sequence[int], *, adapter: str = "", exact_kv: bool = False) -> np.ndarray:
        dense = self._packed.dense(token_ids, self.adapter_number(adapter), exact_kv=exact_kv)
        logits: np.ndarray = dense.float().cpu().numpy()
        return logits

    def _memory_in_use(self) -> tuple[int, int]:
        pools = sum(storage.nbytes for storage in self._packed.storages)
        return devices.in_use(self._device, self._parameter_bytes + pools)

    def _memory_limit(self) -> int:
        return devices.memory_limit(self._device)

    def reset_peak_memory(self) -> None:
        devices.reset_peak(self._device)

    @contextmanager
    def library_model(self) -> Iterator[Any]:
        """The model with transformers' own attention and caches, while the block lasts.

        Where our pools keep fewer bits, that attention is over K and V that are rounded alike.
        """
        with self._packed.own_attention() as model:
            yield model

    def _launch(self, batch: UnifiedBatch) -> Pending:
        step = Step(batch, self.kv, self._adapters)
        ids = token_ids(step, self._latest, self._device)
        if self._graphs is not None and self._graphs.takes(step):
            logits = self._graphs.logits(step, ids)
        else:
            logits = self._packed.logits(step, ids)
        pending = choose(step, devices.to_sample(logits))
        self._latest = pending.for_the_next
        return pending


def _kept_as(layers: Sequence[LayerKV]) -> str:
    """Of ModelInfo.kv_dtype."""
    return devices.dtype_name(layers[0].kept) if layers[0].kept else ""


def _context(model: PreTrainedModel, info: ModelInfo, config: EngineConfig) -> tuple[int, list[str]]:
    """The longest sequence in tokens, with notes; a model's own limit of 0 is unknown."""
    limit = info.max_sequence_length
    ceiling = rope_ceiling(model)
    wanted = config.max_model_len
    if wanted is not None and 0 < limit < wanted:
        raise UsageError(f"--max-model-len is {wanted:,}", f"allowed: at most {limit:,}, the model's own")
    if ceiling is not None and wanted is not None and wanted > ceiling:
        raise UsageError(
            f"--max-model-len is {wanted:,}, and {info.model_type} turns positions by the longest sequence "
            f"of a batch once one is past {ceiling:,}",
            f"allowed on torch: at most {ceiling:,}",
            "or --backend mlx",
        )
    if wanted is not None:
        return wanted, []
    context = min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if ceiling is None or ceiling >= context:
        return context, []
    return ceiling, [
        f"the context is {ceiling:,} tokens: past them {info.model_type} turns positions by the longest "
        "sequence of a batch"
    ]
