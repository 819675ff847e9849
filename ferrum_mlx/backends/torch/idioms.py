"""What models spell out as several calls, in a recorded forward, as one: root mean square norms and rotary
embeddings in halves, as transformers writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ferrum_mlx.backends.torch.device import without_cpu_kernel
from ferrum_mlx.backends.torch.recording import Call, Name, names_in

_TO_THE_END = (1 << 63) - 1  # of a slice


def shortened(calls: Sequence[Call], output: Name) -> list[Call]:
    """The same calls with fewer steps, where numba is there to compile those; else the very same."""
    return list(calls) if without_cpu_kernel() else _Idioms(calls, output).replaced()


class _Idioms:
    def __init__(self, calls: Sequence[Call], output: Name) -> None:
        self._calls = calls
        self._made = {name: call for call in calls for name in call.results}
        self._uses = Counter(name for call in calls for name in names_in((call.args, call.kwargs)))
        self._uses[output] += 1
        self._within: set[Name] = set()  # results that an idiom keeps to itself

    def replaced(self) -> list[Call]:
        found = [
            self._norm(call, 0) or self._norm(call, 1) or self._rotation(call) or call for call in self._calls
        ]
        return [call for call in found if self._within.isdisjoint(call.results)]

    def _norm(self, last: Call, at: int) -> Call | None:
        """weight · (x · rsqrt(mean(x ** 2) + epsilon)), the weight being argument `at`"""
        from ferrum_mlx.backends.torch.cpu_rows import Norm

        if not _is(last, "mul") or len(last.args) != 2:
            return None
        weight, scaled = last.args[at], self._only(last.args[1 - at], "mul")
        root = scaled and self._only(scaled.args[1], "rsqrt")
        total = root and self._only(root.args[0], "add")
        mean = total and self._only(total.args[0], "mean")
        square = mean and self._only(mean.args[0], "pow")
        if not (scaled and root and total and mean and square):
            return None
        if square.args != (scaled.args[0], 2) or mean.args[1:] != ([-1], True):
            return None
        epsilon = total.args[1]
        if type(epsilon) is not float or not isinstance(weight, Name):
            return None
        return self._as(last, Norm(epsilon), (scaled.args[0], weight), scaled, root, total, mean, square)

    def _rotation(self, last: Call) -> Call | None:
        """x · cos + cat(-x[half:], x[:half]) · sin"""
        from ferrum_mlx.backends.torch.cpu_rows import Rotation

        if not _is(last, "add") or len(last.args) != 2:
            return None
        straight, turned = (self._only(each, "mul") for each in last.args)
        joined = turned and self._only(turned.args[0], "cat")
        if not (straight and turned and joined) or len(joined.args[0]) != 2 or joined.args[1:] != (-1,):
            return None
        negative, first = (
            self._only(each, kind) for each, kind in zip(joined.args[0], ("neg", "slice"), strict=True)
        )
        second = negative and self._only(negative.args[0], "slice")
        if not (negative and first and second):
            return None
        x, half = straight.args[0], first.args[-1]
        if type(half) is not int or (first.args, second.args) != ((x, 3, 0, half), (x, 3, half, _TO_THE_END)):
            return None
        given = x, straight.args[1], turned.args[1]
        return self._as(last, Rotation(half), given, straight, turned, joined, negative, first, second)

    def _only(self, name: Any, kind: str) -> Call | None:
        """The call that made a value which is used once."""
        call = self._made.get(name) if isinstance(name, Name) and self._uses[name] == 1 else None
        return call if call is not None and _is(call, kind) else None

    def _as(self, last: Call, function: Callable[..., Any], args: tuple[Any, ...], *within: Call) -> Call:
        self._within.update(name for call in within for name in call.results)
        return replace(last, function=function, args=args)


def _is(call: Call, kind: str) -> bool:
    """By its name in torch, without that of an overload: aten.slice.Tensor is "slice", Tensor.mul "mul"."""
    name: str = getattr(call.function, "__name__", "")
    return not call.kwargs and len(call.results) == 1 and name.partition(".")[0] == kind
