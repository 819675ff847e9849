"""The model catalogue: one TOML card a model, and what a model name resolves to. Plain data, no network."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ferrum_mlx.errors import ModelNotFoundError

ModelFormat = Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository on a model hub.

    Attributes:
        repo: owner/name.
        revision: commit, tag or branch.
    """

    repo: str
    revision: str = "main"

    @property
    def label(self) -> str:
        return f"hub {self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PypiSource:
    """A model file inside a wheel of a Python package index.

    Attributes:
        package, version: of the wheel.
        wheel_sha256: of the wheel, hexadecimal.
        member: path of the model file inside the wheel.
        size: bytes of the member.
        sha256: of the member, hexadecimal.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def label(self) -> str:
        return f"package {self.package} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the catalogue knows of a model.

    Attributes:
        alias: its name on the command line.
        default: the model that is taken when none is named.
        family: the model class, as config.json's model_type.
        context: tokens, the model's own limit.
        verified: whether someone has checked this card's facts against the files.
        sources: in the order in which they are tried.
        sampling: settings its makers suggest, by SamplingParams name.
    """

    alias: str
    title: str
    licence: str
    family: str
    context: int
    sources: tuple[HubSource | PypiSource, ...]
    default: bool = False
    verified: bool = False
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that lies on this machine, checked.

    Attributes:
        name: what the user may call it: alias, repository id, or path.
        path: the folder (safetensors) or the file (gguf).
        card: its catalogue card, if it has one.
        revision: of the files: a hub commit, or a sha256; "" for the user's own files.
        source: where they came from, in words.
    """

    name: str
    path: Path
    format: ModelFormat
    card: Card | None = None
    revision: str = ""
    source: str = "local files"


@cache
def cards() -> dict[str, Card]:
    """All cards by alias, the default first."""
    found = [
        _parse(entry.read_text(encoding="utf-8"))
        for entry in resources.files("ferrum_models").iterdir()
        if entry.name.endswith(".toml")
    ]
    return {card.alias: card for card in sorted(found, key=lambda card: (not card.default, card.alias))}


def find_card(model: str) -> Card | None:
    """The card of an alias or of a hub repository; "" is the default model."""
    if not model:
        return default_card()
    for card in cards().values():
        repos = (source.repo for source in card.sources if isinstance(source, HubSource))
        if model.lower() == card.alias or model in repos:
            return card
    return None


def default_card() -> Card:
    for card in cards().values():
        if card.default:
            return card
    raise ModelNotFoundError("the catalogue has no default model", next_step="reinstall ferrum-mlx")


def _parse(text: str) -> Card:
    fields = tomllib.loads(text)
    sources = tuple(_source(entry) for entry in fields.pop("sources"))
    return Card(sources=sources, **fields)


def _source(entry: dict[str, Any]) -> HubSource | PypiSource:
    kind = entry.pop("kind")
    return HubSource(**entry) if kind == "hub" else PypiSource(**entry)
