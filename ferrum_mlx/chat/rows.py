"""A message as a row of the sessions file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ferrum_mlx.chat.conversation import Message
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


def from_row(row: Sequence[Any]) -> Message:
    values = dict(zip(COLUMNS, row, strict=True))
    values["attached"] = tuple(json.loads(values["attached"]))
    values["usage"] = Usage(**json.loads(values["usage"])) if values["usage"] else None
    values["timings"] = Timings(**json.loads(values["timings"])) if values["timings"] else None
    return Message(**values)


def clean(text: str) -> str:
    """Without halves of characters, which no file can hold; a terminal may hand them over."""
    return text.encode("utf-8", "replace").decode()
