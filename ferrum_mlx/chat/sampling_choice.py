"""Which sampling an answer gets: the command line's over the settings file's over the model card's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from ferrum_mlx.catalog import find_card
from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.sampling import SamplingParams

MAX_TOKENS = (
    512  # unless somebody says otherwise; small models may repeat themselves to the end of the context
)
# What a chat lets people set; the rest of SamplingParams is for programs.
NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "xtc_probability", "xtc_threshold"),
)


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """What people have set, by SamplingParams name.

    Attributes:
        given: on the command line or in the chat.
        settings: in the settings file.
        suggest: take what the model's makers suggest for the rest; else the likeliest token is taken.
    """

    given: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    suggest: bool = True

    def params(self, model: str) -> SamplingParams:
        """For the model of that name, as users write it.

        Raises:
            UsageError: what is set does not go together.
        """
        card = find_card(model) if self.suggest else None
        suggested = card.sampling if card else {}
        return made({"max_tokens": MAX_TOKENS, **suggested, **self.settings, **self.given})

    def with_given(self, changes: Mapping[str, object]) -> SamplingChoice:
        return replace(self, given={**self.given, **changes})


def made(values: Mapping[str, object]) -> SamplingParams:
    """SamplingParams of values that it checks itself."""
    return replace(SamplingParams(), **values)  # type: ignore[arg-type]


def checked(name: str, value: object) -> object:
    """One value as SamplingParams keeps it.

    Raises:
        UsageError: no such name, or a value that is not allowed.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, 3) or NAMES
        raise UsageError(f"{shown(name)} is nothing to set", f"allowed: {', '.join(near)}")
    # XTC needs a temperature, and max_tokens bounds min_tokens; what goes together is checked where it meets.
    return getattr(made({"temperature": 1.0, name: value}), name)


def assignments(words: Iterable[str]) -> dict[str, object]:
    """Values out of words such as "temperature=0.7"; "none" is for a seed or max_tokens.

    Raises:
        UsageError: a word that is none of that form, an unknown name, a value that is not allowed.
    """
    values: dict[str, object] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name:
            raise UsageError(f"{shown(word)} sets nothing", "allowed: name=value, such as temperature=0.7")
        values[name] = checked(name, text if name == "stop" else _value(text))
    return values


def described(values: Mapping[str, object]) -> str:
    """The reverse of `assignments`, for people."""
    return " ".join(f"{name}={_said(value)}" for name, value in values.items())


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(repr, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _value(text: str) -> object:
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
