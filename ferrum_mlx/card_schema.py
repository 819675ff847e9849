"""What a card of the catalogue may say: its TOML to a Card, or one line on what is wrong with it."""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ferrum_mlx.catalog import Card, HubSource, KVShape, PypiSource, Source, StateShape, Variant
from ferrum_mlx.errors import FerrumError, ModelFileError, shown
from ferrum_mlx.sampling import SamplingParams

T = TypeVar("T", bound=Card | HubSource | KVShape | PypiSource | StateShape)
THINKING = ("", "switch", "always")
_VARIANTS = typing.get_args(Variant)
_ALIAS = re.compile(r"[a-z0-9][a-z0-9.-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KINDS: dict[str, type[HubSource] | type[PypiSource]] = {"hub": HubSource, "pypi": PypiSource}
_HASHES = {"sha256", "wheel_sha256"}


def parse(text: str, file: str) -> Card:
    """The card in a file of that name.

    Raises:
        ModelFileError: what is wrong in it, and what would be right.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelFileError(f"{file} is no TOML: {error}") from error
    table["sources"] = tuple(
        _source(entry, f"{file}, source {number}") for number, entry in _tables(table, "sources", file)
    )
    for key, kind in (("kv", KVShape), ("states", StateShape)):
        if key in table:
            table[key] = tuple(
                _made(kind, entry, f"{file}, {key} {number}") for number, entry in _tables(table, key, file)
            )
    card = _made(Card, table, file)
    _check(card, file)
    return card


def check_together(found: Sequence[Card]) -> None:
    """What no card can know alone: aliases and repositories that are unique, drafts that exist, one default.

    Raises:
        ModelFileError: what is wrong.
    """
    by_alias: dict[str, Card] = {}
    repos: dict[str, str] = {}
    for card in found:
        if card.alias in by_alias:
            raise ModelFileError(f"two cards have the alias {shown(card.alias)}")
        by_alias[card.alias] = card
        for repo in {source.repo for source in card.sources if isinstance(source, HubSource)}:
            if repo in repos:
                raise ModelFileError(f"the cards {repos[repo]} and {card.alias} both have {repo}")
            repos[repo] = card.alias
    for card in found:
        if len(card.variants) < len(card.sources):
            raise ModelFileError(f"{card.alias}.toml has two sources of one variant")
        if card.draft and card.draft not in by_alias:
            raise ModelFileError(
                f"{card.alias}.toml names the draft {shown(card.draft)}", "a card's alias is expected"
            )
        if card.draft and (by_alias[card.draft].parameters or 0) >= (card.parameters or 0):
            raise ModelFileError(f"{card.alias}.toml: its draft {card.draft} is no smaller model")
    if (defaults := sum(card.default for card in found)) != 1:
        raise ModelFileError(f"{defaults} cards say default = true", "exactly one is expected")


def _tables(table: dict[str, Any], key: str, file: str) -> list[tuple[int, dict[str, Any]]]:
    found = table.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ModelFileError(f"{file}: {key} is {shown(found)}", "a list of tables is expected, at least one")
    return list(enumerate(found, 1))


def _source(entry: dict[str, Any], where: str) -> Source:
    entry = dict(entry)
    kind = entry.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelFileError(f"{where}: kind is {shown(kind)}", f"allowed: {', '.join(_KINDS)}")
    source: Source = _made(_KINDS[kind], entry, where)
    if source.variant not in _VARIANTS:
        raise ModelFileError(
            f"{where}: variant is {shown(source.variant)}", f"allowed: {', '.join(_VARIANTS)}"
        )
    for name in _HASHES & entry.keys():
        _must(_SHA256.fullmatch, entry[name], f"{where}: {name}", "64 hexadecimal digits")
    if isinstance(source, HubSource):
        if source.sha256 and not source.file:
            raise ModelFileError(
                f"{where} has a sha256, but no file that it is of", "file and sha256, or neither"
            )
        _must(_REPO.fullmatch, source.repo, f"{where}: repo", "owner/name")
        is_gguf = source.file.endswith(".gguf") and "/" not in source.file
        if is_gguf is not (source.variant == "gguf") or (source.file and not is_gguf):
            raise ModelFileError(
                f"{where}: file is {shown(source.file)}", "a .gguf file for the variant gguf, else none"
            )
    return source


def _made(kind: type[T], table: dict[str, Any], where: str) -> T:
    """The dataclass of a table whose keys and types are its fields'."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(table.keys() - hints.keys()):
        raise ModelFileError(f"{where} has the key {shown(unknown[0])}", f"allowed: {', '.join(hints)}")
    for entry in fields(kind):
        if entry.name not in table:
            if entry.default is MISSING and entry.default_factory is MISSING:
                raise ModelFileError(f"{where} has no {entry.name}")
            continue
        value, (allowed, words) = table[entry.name], _types(hints[entry.name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
            raise ModelFileError(f"{where}: {entry.name} is {shown(value)}", f"{words} is expected")
        if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
            raise ModelFileError(f"{where}: {entry.name} is {value}", "a number above 0 is expected")
    return kind(**table)


def _types(hint: Any) -> tuple[type, str]:
    """Of a field's hint, what a TOML value must be, and that in words."""
    if hint in (int, int | None):
        return int, "a whole number"
    if hint is bool:
        return bool, "true or false"
    if typing.get_origin(hint) is dict:
        return dict, "a table"
    return (tuple, "a list") if typing.get_origin(hint) is tuple else (str, "a text")


def _check(card: Card, file: str) -> None:
    _must(_ALIAS.fullmatch, card.alias, f"{file}: alias", "lower case, digits, dots and dashes")
    if file != f"{card.alias}.toml":
        raise ModelFileError(f"{file} is the card of {card.alias}", f"it is to be named {card.alias}.toml")
    for name in ("title", "licence", "family"):
        _must(str.strip, getattr(card, name), f"{file}: {name}", "a text that is not empty")
    _must(THINKING.__contains__, card.thinking, f"{file}: thinking", " or ".join(map(repr, THINKING)))
    try:
        SamplingParams(**card.sampling)  # type: ignore[arg-type]  # whatever the card says is checked there
    except (FerrumError, TypeError) as error:
        raise ModelFileError(f"{file}: sampling: {error}") from error


def _must(test: Callable[[str], object], value: str, what: str, right: str) -> None:
    if not test(value):
        raise ModelFileError(f"{what} is {shown(value)}", f"{right} is expected")
