"""The user's settings: one TOML file, which people write and the chat changes in place."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ferrum_mlx.chat.sampling_choice import checked, made
from ferrum_mlx.errors import FerrumError, UsageError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the file says, or the defaults.

    Attributes:
        model: as on the command line; "" is the default model.
        theme: of the screen; "" is its own.
        panel: the engine panel is open when the chat starts.
        system: system message of new conversations.
        thinking: switch of some reasoning models; None leaves it to the model.
        sampling: values by SamplingParams name.
        keys: keys by the id of a binding, several with commas between them.
    """

    model: str = ""
    theme: str = ""
    panel: bool = True
    system: str = ""
    thinking: bool | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


NAMES = tuple(field.name for field in fields(Settings))


def settings_file() -> Path:
    """$FERRUM_CONFIG, else config.toml in the platform's folder of settings."""
    if named := os.environ.get("FERRUM_CONFIG"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_config_path

    return user_config_path("ferrum-mlx", appauthor=False) / "config.toml"


def load(path: Path | None = None) -> tuple[Settings, list[str]]:
    """The settings, and a note on each entry that cannot be: its default stands. No file is no entry."""
    path = path or settings_file()
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return Settings(), []
    except (OSError, ValueError) as error:  # not readable, not UTF-8, not TOML
        reason = error.strerror if isinstance(error, OSError) else error
        return Settings(), [f"{path} is not used: {reason}"]
    values: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in entries.items():
        try:
            reader = _reader(name)
            values[name] = reader(name, value, notes) if reader in _TABLES else reader(name, value)
        except UsageError as error:
            notes.append(str(error))
    return Settings(**values), [f"{path}: {note}" for note in notes]


def save(changes: Mapping[str, object], path: Path | None = None) -> None:
    """Change entries in the file and keep the rest, comments too; None takes an entry out.

    Args:
        changes: by name; a table's as a mapping, whose entries are changed in the same way.

    Raises:
        UsageError: an entry that cannot be.
        FerrumError: the file cannot be read or written, or is no TOML.
    """
    import tomlkit
    from tomlkit.exceptions import ParseError

    path = (path or settings_file()).resolve()  # what a link points to is written, the link stays
    _check(changes)
    with _explained(path):
        try:
            document = tomlkit.parse(path.read_bytes().decode("utf-8-sig"))
        except FileNotFoundError:
            document = tomlkit.document()
        except (ParseError, UnicodeDecodeError) as error:
            raise FerrumError(
                f"cannot change {path}: {error}", next_step="repair it, or remove it"
            ) from error
        _change(document, changes, tomlkit.table)
        _replace(path, tomlkit.dumps(document))


def _check(changes: Mapping[str, object]) -> None:
    notes: list[str] = []
    for name, value in changes.items():
        reader = _reader(name)
        if value is None:
            continue
        if reader in _TABLES:
            given = {key: entry for key, entry in _mapping(name, value).items() if entry is not None}
            reader(name, given, notes)
        else:
            reader(name, value)
    if notes:
        raise UsageError(notes[0])


def _change(table: Any, changes: Mapping[str, object], new_table: Callable[[], Any]) -> None:
    for name, value in changes.items():
        if value is None:
            table.pop(name, None)
        elif isinstance(value, Mapping):
            if not isinstance(table.get(name), Mapping):
                table[name] = new_table()
            _change(table[name], value, new_table)
        else:
            table[name] = list(value) if isinstance(value, tuple) else value


def _replace(path: Path, text: str) -> None:
    """All of the new text or all of the old, whatever happens meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FerrumError(
            f"cannot write {path}: {error.strerror}", next_step="set FERRUM_CONFIG to another file"
        ) from error


# Readers of entries: the value as Settings has it, or a UsageError; those of tables note what they leave out.


def _reader(name: str) -> Callable[..., Any]:
    if name not in _READERS:
        near = get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise UsageError(f"{shown(name)} is no setting", f"allowed: {', '.join(NAMES)}", hint)
    return _READERS[name]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {shown(value)}", "allowed: a text in quotes")
    return value


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}", "allowed: true or false")
    return value


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {shown(value)}", f"allowed: a table, [{name}]")
    return value


def _sampling(name: str, value: object, notes: list[str]) -> dict[str, object]:
    good: dict[str, object] = {}
    for key, entry in _mapping(name, value).items():
        try:
            good[key] = checked(key, entry)
        except UsageError as error:
            notes.append(f"[{name}] {error}")
    try:
        made({"temperature": 1.0, **good})  # a temperature left out is the model card's
    except UsageError as error:
        notes.append(f"[{name}] {error}; none of the table is used")
        return {}
    return good


def _keys(name: str, value: object, notes: list[str]) -> dict[str, str]:
    good: dict[str, str] = {}
    for key, entry in _mapping(name, value).items():
        if isinstance(entry, str) and all(part.strip() for part in entry.split(",")):
            good[key] = entry
        else:
            notes.append(f"[{name}] {key} is {shown(entry)}; allowed: keys, such as 'ctrl+r' or 'f5,ctrl+r'")
    return good


_TABLES = (_sampling, _keys)
_READERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("model", "theme", "system"), _text),
    **dict.fromkeys(("panel", "thinking"), _switch),
    "sampling": _sampling,
    "keys": _keys,
}
