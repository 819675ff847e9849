"""Paged attention under transformers' untouched model classes.

A step is one packed row of ids, [1, T], with the position of each. Models call attention by the name in
their config: the function registered here finds the running step, writes K and V into the pools and
attends by segment. Models build no mask for a name that transformers knows no mask of, so the function
gets None; which keys a row sees is the step's business. Nothing here knows an architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface

from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.pools import PagedStorage
from ferrum_mlx.errors import UnsupportedModelError

PAGED = "ferrum_paged"


class Attending(ABC):
    """What answers a model's attention calls while it is entered."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, heads, T, head_dim] each → [1, T, heads, value_dim]."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


class RunningStep(Attending):
    """A step on its way through the layers: the model's n-th attention call uses the n-th storage."""

    def __init__(self, step: Step, storages: Sequence[PagedStorage]) -> None:
        self._step, self._storages = step, storages
        self._calls = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._calls == len(self._storages):
            raise UnsupportedModelError(f"the model attends more often than {self._calls} times in a forward")
        storage = self._storages[self._calls]
        self._calls += 1
        storage.write(self._step, key, value)
        return storage.attend(self._step, query, scale, softcap, sinks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered():
            yield
        if self._calls != len(self._storages):
            raise UnsupportedModelError(
                f"the model attended {self._calls} times in a forward, {len(self._storages)} at its load"
            )


_running: ContextVar[Attending] = ContextVar("the step that runs in this thread")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,  # checked at load: see layers.py
) -> tuple[torch.Tensor, None]:
    """What transformers calls; it takes the pair of an output and attention weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_running(query, key, value, scale, softcap, s_aux), None


def attend_running(*call: Any) -> torch.Tensor:
    """`Attending.attend` of what is entered in this thread."""
    return _running.get().attend(*call)


def install(*, compiling: bool = False) -> None:
    """Make the name known to transformers; `compiling` keeps torch.compile out of what it names."""
    AttentionInterface.register(PAGED, torch.compiler.disable(_attend) if compiling else _attend)
