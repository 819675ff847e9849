"""Capture of what a device does, and what stands in its way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
_WARM_UPS = 2  # runs before a capture, in which libraries set themselves up and kernels are compiled
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class CUDACapture:
    """A function of no arguments → one that repeats on the device what it did, and returns the same tensor.

    All captures share one pool of memory: one's result holds until another is replayed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class HostReads(TorchDispatchMode):
    """While entered, notes the first operation that needs a value, or a shape that follows from values.

    torch tags these itself, so no model has to be known: rotary embeddings that look at the longest
    position and experts that are looped over by what is routed to them are the usual ones.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.found is None and needs_values(func, args, kwargs or {}):
            self.found = f"{func.name().removeprefix('aten::')} in {_caller()}"
        return func(*args, **(kwargs or {}))


def needs_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.name().removeprefix("aten::").split(".")[0]
    if name in _INDEXING:  # by positions is harmless, by a mask is not
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "copy_":
        return bool(args[0].device != args[1].device)
    if name == "_to_copy" and kwargs.get("device") is not None:
        return bool(torch.device(kwargs["device"]).type != args[0].device.type)
    return bool(_VALUE_TAGS & set(func.tags))


def _caller() -> str:
    """The innermost code outside of torch and of this file, as file:line."""
    frame = sys._getframe(1)
    own = {str(Path(torch.__file__).parent), __file__}
    while frame.f_back is not None and any(frame.f_code.co_filename.startswith(name) for name in own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
