"""A conversation as a file for people (Markdown) or programs (JSON)."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.rows import clean
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.sanitize import sanitize

_ENDINGS = {
    "": "not finished",
    "length": "cut at the token limit",
    "abort": "stopped",
    "broken": "broken off",
}


def to_markdown(conversation: Conversation, leaf: int | None) -> str:
    """The messages from the beginning to `leaf`; what a model thought is quoted before its answer."""
    parts = [f"# {_heading(conversation)}"]
    if conversation.system:
        parts.append(f"System message:\n\n{_quoted(conversation.system)}")
    parts += [_section(message) for message in conversation.path(leaf)]
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation) -> str:
    """The whole conversation, every branch: one object, indented.

    {"format": "ferrum-mlx conversation", "version": 1, "title": text, "system": text,
    "leaf": id or null, "messages": [message, …]}, messages in the order they were made. Each has the
    fields of Message under their own names: parent is the id of the message before it or null, created
    is seconds since the epoch, attached a list of names, usage and timings objects or null.
    """
    whole = {
        "format": "ferrum-mlx conversation",
        "version": 1,
        "title": conversation.title,
        "system": conversation.system,
        "leaf": conversation.leaf,
        "messages": [asdict(message) for message in conversation.messages.values()],
    }
    return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"


def write(conversation: Conversation, leaf: int | None, path: str | Path = "") -> Path:
    """Write a new file, Markdown or JSON by its suffix; "" is one in this folder named after the title.

    Raises:
        UsageError: another suffix, a file that is there already, or nothing to write.
        FerrumError: the file cannot be written.
    """
    if not conversation.messages:
        raise UsageError("there is nothing to export yet", next_step="ask something first")
    file = Path(path).expanduser() if path else _free_name(conversation)
    match file.suffix.lower():
        case ".md":
            text = to_markdown(conversation, leaf)
        case ".json":
            text = to_json(conversation)
        case suffix:
            raise UsageError(
                f"the file ends in {suffix!r}", "allowed: .md (this branch), .json (all of them)"
            )
    try:
        with open(file, "x", encoding="utf-8", newline="\n") as out:
            out.write(clean(sanitize(text)))
    except FileExistsError:
        raise UsageError(f"{file} is there already", next_step="name another file, or remove it") from None
    except OSError as error:
        raise FerrumError(f"cannot write {file}: {error.strerror}", next_step="name another file") from error
    return file


def _section(message: Message) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(message.created))
    who = "You" if message.role == "user" else message.model or "Answer"
    label = f" ({message.label})" if message.label else ""
    parts = [f"## {who}{label} – {when}"]
    if message.thinking:
        parts.append(_quoted(message.thinking.strip()))
    parts.append(message.text.strip("\n"))
    if message.attached:
        parts.append(f"Attached: {', '.join(message.attached)}")
    if message.role == "assistant" and message.ending in _ENDINGS:
        parts.append(f"*({_ENDINGS[message.ending]})*")
    return "\n\n".join(part for part in parts if part)


def _heading(conversation: Conversation) -> str:
    return " ".join(conversation.title.split()) or "Chat"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _free_name(conversation: Conversation) -> Path:
    stem = re.sub(r"\W+", "-", _heading(conversation).lower()).strip("-")[:40].rstrip("-") or "chat"
    numbers = (Path(f"{stem}{f'-{n}' if n > 1 else ''}.md") for n in range(1, 10_000))
    return next(path for path in numbers if not path.exists())
