"""A message as a row of the sessions file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from ferrum_mlx.chat.conversation import Ending, Message, Role
from ferrum_mlx.metrics import Timings, Usage

COLUMNS = tuple(field.name for field in fields(Message))


def to_row(message: Message) -> tuple[Any, ...]:
    """Values in the order of COLUMNS; what SQLite has no type for is JSON."""
    values = {
        **{name: getattr(message, name) for name in COLUMNS},
        "attached": json.dumps(message.attached),
        "usage": json.dumps(asdict(message.usage)) if message.usage else None,
        "timings": json.dumps(asdict(message.timings)) if message.timings else None,
    }
    return tuple(clean(value) if isinstance(value, str) else value for value in values.values())


def from_row(row: Sequence[Any]) -> tuple[Message | None, bool]:
    """The message, and whether all of it could be read. What could not is left out.

    Without an id or a role there is no message; without a parent it has 0, which `mend` changes.
    """
    values: dict[str, Any] = {}
    for name, value in zip(COLUMNS, row, strict=True):
        try:
            values[name] = _READERS[name](value)
        except (TypeError, ValueError, RecursionError):  # of no such type; no such JSON
            continue
    readable = "id" in values and "role" in values
    return Message(**{"parent": 0, **values}) if readable else None, len(values) == len(row)


def mend(messages: Mapping[int, Message]) -> int:
    """Put messages whose parent is not there below the last one before them that they could follow.

    A parent is an earlier message, so there is no way around in circles afterwards. Returns how many.
    """
    mended = 0
    last: dict[str, int] = {}  # id of the last message, by role
    for message in sorted(messages.values(), key=lambda message: message.id):
        parent = message.parent
        if parent is not None and not (parent in messages and parent < message.id):
            message.parent = last.get("assistant" if message.role == "user" else "user")
            mended += 1
        last[message.role] = message.id
    return mended


def clean(text: str) -> str:
    """Without halves of characters, which no file can hold; a terminal may hand them over."""
    return text.encode("utf-8", "replace").decode()


def _a(*types: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return read


def _one_of(allowed: Iterable[str]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in allowed:
            raise ValueError
        return value

    return read


def _numbers(kind: type[Usage] | type[Timings]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value is None:
            return None
        loaded = kind(**json.loads(value))
        for number in asdict(loaded).values():
            _a(int, float)(number)
        return loaded

    return read


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_a(str)(text) for text in _a(list)(json.loads(value)))


_READERS: dict[str, Callable[[Any], Any]] = {
    "id": _a(int),
    "parent": _a(int, type(None)),
    "role": _one_of(get_args(Role)),
    **dict.fromkeys(("text", "thinking", "model", "label", "sent"), _a(str)),
    **dict.fromkeys(("created", "thought_s"), _a(int, float)),
    "ending": _one_of(get_args(Ending)),
    "attached": _texts,
    "usage": _numbers(Usage),
    "timings": _numbers(Timings),
}
