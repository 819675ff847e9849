"""The model with its pools: a step's rows in, logits out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.adapters import AdaptedLayers
from ferrum_mlx.backends.torch.attention import PAGED, RunningStep, install
from ferrum_mlx.backends.torch.device import give_back, upload
from ferrum_mlx.backends.torch.exact import ExactRows
from ferrum_mlx.backends.torch.pools import PagedStorage
from ferrum_mlx.backends.torch.quantized import ROUNDED
from ferrum_mlx.backends.torch.replay import Replays


class PackedModel:
    """`storages` are in the order in which the model attends; `rounds`: they keep fewer bits."""

    def __init__(
        self,
        model: PreTrainedModel,
        storages: Sequence[PagedStorage],
        adapted: AdaptedLayers,
        *,
        exact: bool,
        rounds: bool = False,
    ) -> None:
        install()
        self._model: Any = model
        self._adapted = adapted
        self._own_attention = model.config._attn_implementation
        self._reference = ROUNDED if rounds else self._own_attention
        self.storages = list(storages)
        self._exact = exact
        if (exact or model.device.type == "mps") and model._can_set_experts_implementation():
            # an expert's products as such: they can be tiled, and MPS has no grouped ones
            model.set_experts_implementation("eager")
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.off: list[str] = []
        if not self._selects_rows:
            self.off.append("row selection before the output head: the model's forward cannot")
        model.set_attn_implementation(PAGED)
        self._replays: Replays | None = None
        self._compiled: Any = None

    def compile(self) -> None:
        """Make `forward` able to run kernels that torch fuses out of what is between attention calls."""
        install(compiling=True)
        self._compiled = torch.compile(self._model, dynamic=True)

    def replay_few_rows(self, most: int) -> None:
        """Leave the model's Python out of small steps, if it can be: from the start up to `most` rows."""
        replays = Replays(self._model, self._plain, self._adapted)
        if reason := replays.prepare(most):
            self.off.append(f"replayed steps of few rows: {reason}")
            return
        if replays.uncompiled:
            self.off.append(f"compiled norms and rotary embeddings: {replays.uncompiled}")
        self._replays = replays
        give_back()  # the layers that were joined left holes

    def _plain(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, vocab] for the ids and positions [T], attended to by what is entered."""
        output = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def logits(self, step: Step, ids: torch.Tensor) -> torch.Tensor:
        """[R, vocab] for the ids [T]; with R = 0 the output head computes no row."""
        with self._adapted.of(step):
            return self._logits(step, ids)

    def _logits(self, step: Step, ids: torch.Tensor) -> torch.Tensor:
        if self._replays is not None and self._replays.takes(step):
            positions = torch.from_numpy(step.positions).long()
            return self._replays.logits(RunningStep(step, self.storages), ids, positions)
        device = self._model.device
        positions, rows = (upload(array.astype(np.int64), device) for array in (step.positions, step.rows))
        return self.forward(step, ids, positions, rows)

    @torch.no_grad()
    def forward(
        self,
        step: Step,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
        *,
        compiled: bool = False,
    ) -> torch.Tensor:
        """[R, vocab] for the ids and positions [T]; without `rows`, [R], all reach the output head."""
        model = self._compiled if compiled else self._model
        selected = {"logits_to_keep": rows} if self._selects_rows and rows is not None else {}
        with RunningStep(step, self.storages).entered(), ExactRows() if self._exact else nullcontext():
            output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **selected)
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._selects_rows else logits[rows]

    @torch.inference_mode()
    def dense(self, ids: Sequence[int], adapter: int = 0, *, exact_kv: bool = False) -> torch.Tensor:
        """[len(ids), vocab] by the model's own attention and cache, through the adapter of that number."""
        with self.own_attention(exact_kv=exact_kv) as model, self._adapted.through(adapter):
            given = torch.tensor([list(ids)], device=model.device)
            logits: torch.Tensor = model(input_ids=given, use_cache=True).logits[0]
        return logits

    @contextmanager
    def own_attention(self, *, exact_kv: bool = False) -> Iterator[Any]:
        """The model, with the attention that it was loaded with while the block lasts.

        Where pools keep fewer bits, it is the model's own explicit attention over K and V rounded alike,
        unless `exact_kv`.
        """
        self._model.set_attn_implementation(self._own_attention if exact_kv else self._reference)
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(PAGED)

    def release(self) -> None:
        """Drop the weights and the pools."""
        self._adapted.remove()
        if self._model is not None:
            self._model.set_attn_implementation(self._own_attention)  # somebody else may hold it
        self._model = self._replays = self._compiled = None
        self.storages.clear()
