"""The model with its pools: a step's rows in, logits out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.attention import PAGED, RunningStep, install
from ferrum_mlx.backends.torch.exact import ExactRows
from ferrum_mlx.backends.torch.pools import PagedStorage


class PackedModel:
    """`storages` are in the order in which the model attends."""

    def __init__(self, model: PreTrainedModel, storages: Sequence[PagedStorage], *, exact: bool) -> None:
        install()
        self._model: Any = model
        self._own_attention = model.config._attn_implementation
        self.storages = list(storages)
        self._exact = exact
        if exact and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # an expert's products as such, to be tiled
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.off: list[str] = []
        if not self._selects_rows:
            self.off.append("row selection before the output head: the model's forward cannot")
        model.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def logits(self, step: Step) -> torch.Tensor:
        """[R, vocab]; with R = 0 the output head computes no row."""
        device = self._model.device
        ids = torch.from_numpy(step.token_ids).long()[None].to(device, non_blocking=True)
        positions = torch.from_numpy(step.positions).long()[None].to(device, non_blocking=True)
        rows = torch.from_numpy(step.rows).long().to(device, non_blocking=True)
        selected = {"logits_to_keep": rows} if self._selects_rows else {}
        with RunningStep(step, self.storages).entered(), ExactRows() if self._exact else nullcontext():
            output = self._model(input_ids=ids, position_ids=positions, use_cache=False, **selected)
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_rows else logits[rows]

    @torch.inference_mode()
    def dense(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab] by the model's own attention and cache."""
        with self.own_attention() as model:
            given = torch.tensor([list(ids)], device=model.device)
            logits: torch.Tensor = model(input_ids=given, use_cache=True).logits[0]
        return logits

    @contextmanager
    def own_attention(self) -> Iterator[Any]:
        """The model, with the attention that it was loaded with while the block lasts."""
        self._model.set_attn_implementation(self._own_attention)
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(PAGED)

    def release(self) -> None:
        """Drop the weights and the pools."""
        self._model = None
        self.storages.clear()
