"""What torch was asked for during a forward, written down as a straight line of calls, and run again.

Knows no model. What a recorded forward may not do: look at values, change what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ferrum_mlx.backends.torch.capture import needs_values

Function: TypeAlias = Callable[..., Any]


class CannotRecord(Exception):
    """What stands in the way, as text."""


class ChangesInPlace(Exception):
    """Calls that look equal need not be: record again, every call by itself."""


class Name(str):
    """A variable of the program; it stands for a tensor in the arguments of a call."""

    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class Call:
    """`results = function(*args, **kwargs)`; Names among the arguments are results of earlier calls."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Name, ...]


class Recorder(TorchDispatchMode):
    """While entered, writes torch's operations down.

    Args:
        given: what differs from run to run; every other tensor that is met is a constant.
        once: write equal calls once; raises ChangesInPlace where that would be wrong.
    """

    def __init__(self, *given: torch.Tensor, once: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.once = once
        self.calls: list[Call] = []
        self.constants: dict[Name, Any] = {}
        self._names: dict[int, Name] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self._bindings: dict[Any, Function] = {}
        self._seen: dict[tuple[Function, str], Call] = {}
        self.given = [self._know(tensor) for tensor in given]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if needs_values(func, args, kwargs):
            raise CannotRecord(f"the model's forward looks at values ({func.name()})")
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        out = func(*args, **kwargs)
        if func not in self._bindings:
            self._bindings[func] = _binding(func, args, kwargs, out)
        self.note(self._bindings[func], args, kwargs, out)
        return out

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.once:
            raise ChangesInPlace
        kept = {tensor.untyped_storage().data_ptr() for tensor in self._constants()}
        if id(args[0]) not in self._names or args[0].untyped_storage().data_ptr() in kept:
            raise CannotRecord(f"the model's forward changes what it keeps ({func.name()})")
        out = func(*args, **kwargs)
        if out is not args[0]:
            raise CannotRecord(f"{func.name()} gives something else than what it changes")
        refs, named = tree_map(self._reference, (args, kwargs))
        self.calls.append(Call(func, refs, named, ()))
        return out

    def _constants(self) -> Iterator[torch.Tensor]:
        return (value for value in self.constants.values() if isinstance(value, torch.Tensor))

    def note(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        *,
        pure: bool = True,
    ) -> None:
        """One call and what came of it: a tensor, or several; if it is pure, equal calls are one."""
        if id(out) in self._names:  # a conversion that had nothing to do
            return
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        args, kwargs = tree_map(self._reference, (args, kwargs))
        key = function, repr((args, kwargs))
        if pure and self.once and key in self._seen:
            for tensor, name in zip(outs, self._seen[key].results, strict=True):
                self._names[id(tensor)] = name
                self._kept.append(tensor)
            return
        call = Call(function, args, kwargs, tuple(map(self._know, outs)))
        self._seen[key] = call
        self.calls.append(call)

    def name_of(self, tensor: torch.Tensor) -> Name:
        return self._names[id(tensor)]

    def _know(self, value: Any) -> Name:
        name = Name(f"v{len(self._kept)}")
        self._names[id(value)] = name
        self._kept.append(value)
        return name

    def _reference(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0):
            return value
        if id(value) not in self._names:
            self.constants[self._know(value)] = value
        return self._names[id(value)]


def unrecorded(function: Function, *args: Any) -> Any:
    """function(*args), of which no recorder hears."""
    with _disable_current_modes():
        return function(*args)


def _binding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Function:
    """torch's own Python binding of an operation, twice as quick to call, if it takes the same arguments."""
    name = func._schema.name.removeprefix("aten::")
    for owner in (torch.Tensor, torch) if isinstance(out, torch.Tensor) else ():
        found: Function | None = getattr(owner, name, None)
        try:
            if found is not None and unrecorded(_agrees, found, args, kwargs, out):
                return found
        except (TypeError, RuntimeError):
            continue
    plain: Function = func
    return plain


def _agrees(found: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> bool:
    return torch.equal(found(*args, **kwargs), out)


def compiled(
    calls: Sequence[Call], given: Sequence[Name], constants: dict[Name, Any], output: Name
) -> Function:
    """A Python function of the given values that makes the calls and returns the output.

    A variable is dropped behind its last use, so that memory goes round.
    """
    functions: dict[Any, str] = {}
    lines, alive = [f"    return {output}"], {output}
    for call in reversed(calls):
        used = names_in((call.args, call.kwargs))
        ended = [name for name in [*used, *call.results] if name not in alive and name not in constants]
        if ended:
            lines.append(f"    {' = '.join(dict.fromkeys(ended))} = None")
        alive.update(used)
        function = functions.setdefault(call.function, f"f{len(functions)}")
        arguments = [*map(repr, call.args), *(f"{key}={value!r}" for key, value in call.kwargs.items())]
        target = f"{', '.join(call.results)} = " if call.results else ""
        lines.append(f"    {target}{function}({', '.join(arguments)})")
    source = "\n".join([f"def run({', '.join(given)}):", *reversed(lines)])
    scope: dict[str, Any] = {name: function for function, name in functions.items()}
    scope |= {str(name): value for name, value in constants.items()}
    exec(source, scope)
    run: Function = scope["run"]
    return run


def names_in(arguments: Any) -> list[Name]:
    found: list[Name] = []
    tree_map(lambda value: found.append(value) if isinstance(value, Name) else None, arguments)
    return found
