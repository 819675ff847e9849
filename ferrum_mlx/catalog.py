"""The model catalogue: one TOML card a model, and what a model name resolves to. Plain data, no network."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ferrum_mlx.errors import ModelNotFoundError, UsageError, shown
from ferrum_mlx.kv.precision import head_bytes

if TYPE_CHECKING:
    from ferrum_mlx.gguf import GGUFFile

ModelFormat = Literal["safetensors", "gguf"]
Variant = Literal["safetensors", "mlx-4bit", "gguf"]
# By backend, the first that a card has: MLX's 4 bits where Metal multiplies them, else what its makers gave.
_ON_METAL: tuple[Variant, ...] = ("mlx-4bit", "safetensors", "gguf")
_ELSEWHERE: tuple[Variant, ...] = ("safetensors", "gguf", "mlx-4bit")
_ON_TORCH: tuple[Variant, ...] = ("safetensors", "gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository on a model hub.

    Attributes:
        repo: owner/name.
        revision: commit, tag or branch.
        variant: what is in it: the makers' own weights, MLX's in 4 bits, or a GGUF file.
        file: the GGUF file; "" where all files of a safetensors model are meant.
        size: bytes of the weights files; None where nobody has said.
        sha256: of `file`, hexadecimal, as its publisher states it; "" is not known.
    """

    repo: str
    revision: str = "main"
    variant: Variant = "safetensors"
    file: str = ""
    size: int | None = None
    sha256: str = ""

    @property
    def label(self) -> str:
        return f"hub {self.repo}@{self.revision}" + (f" {self.file}" if self.file else "")

    @property
    def format(self) -> ModelFormat:
        return "gguf" if self.file else "safetensors"


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
    variant: Variant = "gguf"

    @property
    def label(self) -> str:
        return f"package {self.package} {self.version}"

    @property
    def format(self) -> ModelFormat:
        return "gguf"


Source = HubSource | PypiSource


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Layers that keep keys and values of one shape; `window` is how many tokens they keep, None for all."""

    layers: int
    heads: int
    head_dim: int
    window: int | None = None

    def num_bytes(self, tokens: int, bytes_a_value: int, kv_bits: int | None = None) -> int:
        """Of a sequence's keys and values, with `kv_bits` a number where they are quantized."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return 2 * self.layers * self.heads * head_bytes(self.head_dim, kv_bits, bytes_a_value) * kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Layers that carry a state of one size from token to token.

    Attributes:
        numbers: of one layer, in the dtype that the model computes in, as of a convolution's inputs.
        float32: of one layer, in float32 whatever the model computes in.
    """

    layers: int
    numbers: int
    float32: int = 0

    def num_bytes(self, bytes_a_value: int) -> int:
        """Of one sequence's state, however long the sequence is."""
        return self.layers * (bytes_a_value * self.numbers + 4 * self.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the catalogue knows of a model.

    Attributes:
        alias: its name on the command line.
        default: the model that is taken when none is named.
        family: the model class, as config.json's model_type.
        context: tokens, the model's own limit.
        parameters: how many weights the language model has; None where nobody has said.
        experts: how many of them are in experts, which torch cannot pack on a CPU; None of a model without.
        kv: its layers that keep keys and values; others keep a state or share a neighbour's. Empty where
            nobody has said.
        states: its recurrent layers.
        verified: whether someone has checked this card's facts against the files.
        sources: in the order in which they are tried where every variant will do.
        sampling: settings its makers suggest, by SamplingParams name.
        draft: alias of a smaller model with the same vocabulary, for --speculative draft:ALIAS; "" is none.
        thinking: "switch" has a switch for it, "always" thinks; "" never does.
        notes: what else a user should know, in words.
    """

    alias: str
    title: str
    licence: str
    family: str
    context: int
    sources: tuple[Source, ...]
    parameters: int | None = None
    experts: int | None = None
    kv: tuple[KVShape, ...] = ()
    states: tuple[StateShape, ...] = ()
    default: bool = False
    verified: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    draft: str = ""
    thinking: str = ""
    notes: str = ""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those there are, in the order of `sources`."""
        return tuple(dict.fromkeys(source.variant for source in self.sources))

    def kv_bytes(self, tokens: int, bytes_a_value: int = 2, kv_bits: int | None = None) -> int:
        """Of one sequence's keys and values; 16 bits a value unless said otherwise."""
        return sum(shape.num_bytes(tokens, bytes_a_value, kv_bits) for shape in self.kv)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a model's name stands for: sources in the order in which they are tried."""

    name: str
    card: Card
    sources: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def gguf(self) -> GGUFFile:
        """The reader of a GGUF file, for all who load it: its header is read once.

        Raises:
            ModelFileError, UnsupportedModelError: as GGUFFile does.
        """
        from ferrum_mlx.gguf import GGUFFile

        return GGUFFile(self.path)


@cache
def cards() -> dict[str, Card]:
    """All cards by alias, the default first.

    Raises:
        ModelFileError: a card that is not of the schema (card_schema.py).
    """
    from ferrum_mlx.card_schema import check_together, parse

    found = [
        parse(entry.read_text(encoding="utf-8"), entry.name)
        for entry in resources.files("ferrum_models").iterdir()
        if entry.name.endswith(".toml")
    ]
    check_together(found)
    return {card.alias: card for card in sorted(found, key=_order)}


def _order(card: Card) -> tuple[bool, str, int]:
    """The default, then families by name, the smallest model of each first."""
    return not card.default, card.alias.partition("-")[0], card.parameters or 0


def find_card(model: str) -> Card | None:
    """The card of an alias, with or without a variant, or of a hub repository; "" is the default model."""
    try:
        choice = choose(model)
    except UsageError:
        return None
    return choice.card if choice else None


def choose(model: str, backend: str = "") -> Choice | None:
    """What an alias, alias:variant or a catalogued repository means; None for any other name.

    The repository of a card's first source means the card, any other that one source.

    Args:
        model: "" is the default model.
        backend: mlx or torch; "" takes what this machine would.

    Raises:
        UsageError: a variant that the card does not have, or the backend cannot read.
    """
    alias, _, variant = model.lower().partition(":")
    if not model or alias in cards():
        card = cards()[alias] if model else default_card()
        sources = _ordered(card.sources, backend)
        if variant or model.endswith(":"):
            sources = tuple(source for source in sources if source.variant == variant)
        if not sources:
            raise _no_variant(card, variant, backend)
        return Choice(f"{card.alias}:{variant}" if variant else card.alias, card, sources)
    for card in cards().values():
        named = tuple(s for s in card.sources if isinstance(s, HubSource) and s.repo == model)
        if named and named[0] == card.sources[0]:
            return Choice(card.alias, card, _ordered(card.sources, backend))
        if named:
            return Choice(f"{card.alias}:{named[0].variant}", card, named)
    return None


def default_card() -> Card:
    for card in cards().values():
        if card.default:
            return card
    raise ModelNotFoundError("the catalogue has no default model", next_step="reinstall ferrum-mlx")


def _ordered(sources: Sequence[Source], backend: str) -> tuple[Source, ...]:
    """Those that the backend can read, in the order it would have them."""
    on_metal = platform.system() == "Darwin" and platform.machine() == "arm64"
    order = _ON_TORCH if backend == "torch" else _ON_METAL if on_metal else _ELSEWHERE
    return tuple(source for variant in order for source in sources if source.variant == variant)


def _no_variant(card: Card, variant: str, backend: str) -> UsageError:
    if variant in card.variants:
        what = f"{card.alias}:{variant} is packed for MLX, which {backend} cannot read"
        readable = (source.variant for source in _ordered(card.sources, backend))
        return UsageError(what, f"allowed: {_listed(card, readable)}", "or --backend mlx")
    return UsageError(
        f"{card.alias} has no variant {shown(variant)}", f"allowed: {_listed(card, card.variants)}"
    )


def _listed(card: Card, variants: Iterable[Variant]) -> str:
    return ", ".join(f"{card.alias}:{variant}" for variant in dict.fromkeys(variants))
