"""LoRA adapters beside the Linear layers they change: each row of a step goes through its own, or none.

A hook behind a changed layer adds to the rows of each adapter what that adds. Rows without one keep their
very bits. Outside of a step, and in steps of no adapter, layers are as ever. In a replayed step the hook
is one of the calls that stay whole, and asks the running step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ferrum_mlx.adapters import Adapter, LowRank, Places, check_fits
from ferrum_mlx.backends.step import Step
from ferrum_mlx.backends.torch.device import upload
from ferrum_mlx.backends.torch.recording import Recorder, unrecorded
from ferrum_mlx.errors import UnsupportedModelError

Pair = tuple[torch.Tensor, torch.Tensor]  # A [rank, in] and B [out, rank]
Groups = Sequence[tuple[int, torch.Tensor | None]]  # adapters by number, with their rows; None: all


class AdaptedLayers:
    """Products are computed in the model's dtype.

    Attributes:
        recorder: told of each change while a forward is recorded, in place of making it.

    Raises:
        UnsupportedModelError: an adapter does not fit the model.
        ModelFileError: an adapter lacks tensors.
    """

    def __init__(self, model: PreTrainedModel, adapters: Sequence[Adapter]) -> None:
        self.groups: Groups = ()
        self.count: int | None = None  # rows that layers see now; None: however many there are
        self.recorder: Recorder | None = None
        self.nbytes = 0
        self._hooks: list[Any] = []
        if not adapters:
            return
        self._device, self._dtype = model.device, model.dtype
        modules = dict(model.named_modules())
        places = linear_places(modules)
        for adapter in adapters:
            check_fits(adapter, places)
        for path in dict.fromkeys(path for adapter in adapters for path in adapter.layers):
            pairs = {
                number: self._pair(adapter.layers[path])
                for number, adapter in enumerate(adapters, 1)
                if path in adapter.layers
            }
            self._hooks.append(modules[path].register_forward_hook(_Change(self, path, pairs)))

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Layers see the rows of a step."""
        with self._entered(step.once("adapters", lambda: self._groups_of(step)), step.num_tokens):
            yield

    @contextmanager
    def through(self, number: int) -> Iterator[None]:
        """All rows go through an adapter; 0 is none."""
        with self._entered([(number, None)] if number else [], None):
            yield

    @contextmanager
    def _entered(self, groups: Groups, count: int | None) -> Iterator[None]:
        self.groups, self.count = groups, count
        try:
            yield
        finally:
            self.groups, self.count = (), None

    def _groups_of(self, step: Step) -> Groups:
        return [
            (number, None if rows is None else upload(rows, self._device))
            for number, rows in step.adapter_rows()
        ]

    def remove(self) -> None:
        """Take the hooks off, and drop the adapters with them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _pair(self, layer: LowRank) -> Pair:
        a, b = (torch.from_numpy(part.copy()).to(self._device, self._dtype) for part in (layer.a, layer.b))
        self.nbytes += a.nbytes + b.nbytes
        return a, b


class _Change:
    """The hook of one layer."""

    def __init__(self, owner: AdaptedLayers, path: str, pairs: dict[int, Pair]) -> None:
        self._owner, self._path, self._pairs = owner, path, pairs

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        recorder = self._owner.recorder
        if recorder is None:
            return self.added(args[0], y)
        out: torch.Tensor = unrecorded(torch.clone, y)
        recorder.note(self.added, (args[0], y), {}, out, pure=False)
        return out

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y` [..., out], with what the adapters make of `x` [..., in] on their rows."""
        owner = self._owner
        if not owner.groups:
            return y
        known = owner.count is None or x.numel() == owner.count * x.shape[-1]
        if not known or not isinstance(y, torch.Tensor):
            raise UnsupportedModelError(
                f"{self._path} is not a layer of one output a token, so no adapter can change it here",
                next_step="leave the adapter away, or merge it into the model",
            )
        flat, out = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for number, rows in owner.groups:
            if number not in self._pairs:
                continue
            a, b = self._pairs[number]
            if rows is None:
                out = out + F.linear(F.linear(flat.to(a.dtype), a), b).to(out.dtype)
            else:
                change = F.linear(F.linear(flat[rows].to(a.dtype), a), b)
                out = out.index_add(0, rows, change.to(out.dtype))
        return out.reshape(y.shape)


def linear_places(modules: dict[str, nn.Module]) -> Places:
    """A quantized layer of whatever class says how many features it takes and gives, as torch's own does."""
    found: dict[str, tuple[int, int] | str] = {}
    for path, module in modules.items():
        takes, gives = (getattr(module, f"{side}_features", None) for side in ("in", "out"))
        if isinstance(takes, int) and isinstance(gives, int):
            found[path] = takes, gives
        else:
            found[path] = type(module).__name__
    return found
