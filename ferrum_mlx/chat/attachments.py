"""Files in a prompt: `@path` sends the text of a file along."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.sanitize import sanitize

MOST_BYTES = 1_000_000  # of a file
_MOST_SEEN = 3000  # entries that a completion looks at
_MOST_SHOWN = 50
_NOT_WALKED = {"node_modules", "__pycache__"}
# Behind a blank, or at the beginning: an address has its @ inside a word. A second @ takes the meaning away.
_REFERENCE = re.compile(r'(?<!\S)@(?:(?P<text>@\S)|"(?P<quoted>[^"\n]+)"|(?P<bare>[^\s@"]\S*))')
_FENCED = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_BEHIND = ".,;:!?)]}'\""  # what may end a sentence behind a path


@dataclass(frozen=True, slots=True)
class Attached:
    """`text_for_model` is the prompt with the files behind it; `names` of the files, as they were written."""

    text_for_model: str
    names: tuple[str, ...]


def attach(text: str) -> Attached:
    """Put the files that a prompt refers to behind it, each in a fence under its name.

    A reference is @path or @"a path", outside fenced code. Where no such file is, a bare word without a
    slash that resembles no file name there is a text (@property, @someone); so is @@path.

    Raises:
        UsageError: a file that is missing, too large, no text, or may not be read.
    """
    fences = [match.span() for match in _FENCED.finditer(text)]
    files: dict[str, str] = {}
    parts, end = [], 0
    for match in _REFERENCE.finditer(text):
        if any(start <= match.start() < stop for start, stop in fences):
            continue
        if match["text"]:
            parts.append(text[end : match.start()])
            end = match.start() + 1
        elif name := match["quoted"] or _bare(match["bare"]):
            files.setdefault(name, _read(name))
    blocks = [_block(name, content) for name, content in files.items()]
    return Attached("\n\n".join(["".join([*parts, text[end:]]), *blocks]), tuple(files))


def reference(path: str) -> str:
    """How a prompt refers to a path that `complete` gave."""
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def complete(prefix: str) -> list[str]:
    """Paths that a reference so far may become, folders with a slash behind them; hidden files left out.

    First those in the folder that it names; then, where it names none, those below the current folder
    whose name has it. At most 3000 entries are looked at, 50 given.
    """
    head, slash, start = prefix.rpartition("/")
    folder = _path(f"{head}{slash}" or ".")
    here = [
        f"{head}{slash}{name}{'/' * is_folder}"
        for name, is_folder in _entries(folder, _MOST_SEEN)
        if name.casefold().startswith(start.casefold())
        and (start.startswith(".") or not name.startswith("."))
    ]
    here.sort(key=str.casefold)
    if not slash and len(start) > 1:
        below = (path for path in _below(folder) if start.casefold() in path.rpartition("/")[2].casefold())
        here += sorted(set(below) - set(here), key=lambda path: (path.count("/"), path))
    return here[:_MOST_SHOWN]


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # unlike Path's own, it leaves a home that nobody has


def _bare(word: str) -> str:
    """The path in a word behind an @; "" if it is none."""
    for path in (word, word.rstrip(_BEHIND)):
        if path and os.path.exists(_path(path)):
            return path
    path = word.rstrip(_BEHIND)
    looks_it = re.fullmatch(r"[^()\[\]{}<>\"'=]+", path) is not None
    return path if looks_it and ("/" in path or _near(_path(path))) else ""


def _read(name: str) -> str:
    path = _path(name)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"@{name} is a folder", "allowed: a text file", "name one in it")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"@{name} is no ordinary file", "allowed: a text file")
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"@{name} is not there", _hint(path), "type @@ for a text that begins with @"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"@{name} cannot be read: {reason}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"@{name} has {max(status.st_size, len(data)):,} bytes", f"allowed: at most {MOST_BYTES:,}"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"@{name} is no UTF-8 text", "allowed: a text file")
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def _block(name: str, content: str) -> str:
    longest = max(map(len, re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    kind = re.sub(r"\W", "", Path(name).suffix)
    return f"{name}:\n{fence}{kind}\n{content.removesuffix(chr(10))}\n{fence}"


def _hint(path: Path) -> str:
    near = _near(path)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _near(path: Path) -> list[str]:
    names = [name for name, _ in _entries(path.parent, _MOST_SEEN)]
    by_folded = {name.casefold(): name for name in names}
    near = get_close_matches(path.name.casefold(), by_folded, 3)
    return [shown(str(path.parent / by_folded[name])) for name in near]


def _entries(folder: Path, most: int) -> Iterator[tuple[str, bool]]:
    """Names in a folder and whether they are folders; nothing of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from [(entry.name, entry.is_dir()) for entry in islice(entries, most)]
    except (OSError, ValueError):
        return


def _below(folder: Path) -> Iterator[str]:
    """Files below the folders in this one, nearest first."""
    seen, waiting = 0, [""]
    while waiting and seen < _MOST_SEEN:
        inside = waiting.pop(0)
        for name, is_folder in _entries(folder / inside, _MOST_SEEN - seen):
            seen += 1
            if name.startswith(".") or name in _NOT_WALKED:
                continue
            if is_folder:
                waiting.append(f"{inside}{name}/")
            else:
                yield f"{inside}{name}"
