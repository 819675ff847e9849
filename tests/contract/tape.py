"""A captured graph without a GPU: what torch did is kept on a tape, and repeated on the very same tensors.

As with CUDA graphs no Python of the model runs at a replay, so whatever a forward took from the host stays
as it was at the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Callable[[], Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.tape.append((lambda: func(*args, **kwargs), tree_leaves(result)))
        return result


class TapeCapture:
    """`replays` counts them."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad(), _Recorder() as recorder:
            result = run()

        def replay() -> torch.Tensor:
            self.replays += 1
            with torch.inference_mode(False), torch.no_grad():
                for again, before in recorder.tape:
                    for old, new in zip(before, tree_leaves(again()), strict=True):
                        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)
            return result

        return replay
