"""Sampling by precedence, and name=value words."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ferrum_mlx.catalog import default_card
from ferrum_mlx.chat.sampling_choice import MAX_TOKENS, NAMES, SamplingChoice, assignments, described
from ferrum_mlx.errors import UsageError
from ferrum_mlx.sampling import SamplingParams


def test_command_line_over_settings_over_card() -> None:
    card = default_card().sampling
    assert card["temperature"] not in (0.0, 0.5, 0.6)  # or this tells nothing
    choice = SamplingChoice()
    assert choice.params("") == SamplingParams(max_tokens=MAX_TOKENS, **card)
    choice = SamplingChoice(settings={"temperature": 0.5, "seed": 3, "max_tokens": 9})
    assert [getattr(choice.params(""), name) for name in ("temperature", "seed", "max_tokens")] == [0.5, 3, 9]
    given = choice.with_given({"temperature": 0.6, "max_tokens": None})
    assert [getattr(given.params(""), name) for name in ("temperature", "seed", "max_tokens")] == [
        0.6,
        3,
        None,
    ]
    assert choice.params("").temperature == 0.5
    assert SamplingChoice(suggest=False).params("") == SamplingParams(max_tokens=MAX_TOKENS)


def test_what_does_not_go_together_is_refused() -> None:
    choice = SamplingChoice({"temperature": 0.0}, {"xtc_probability": 0.5})
    with pytest.raises(UsageError, match="xtc_probability"):
        choice.params("")


def test_words_become_values() -> None:
    words = ["temperature=0.7", "top_k=40", "seed=none", "stop=7", "max_tokens=none", "xtc_probability=1"]
    assert assignments(words) == {
        "temperature": 0.7,
        "top_k": 40,
        "seed": None,
        "stop": ("7",),
        "max_tokens": None,
        "xtc_probability": 1.0,
    }
    assert (
        described({"temperature": 0.7, "seed": None, "stop": ("a",)}) == "temperature=0.7 seed=none stop='a'"
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("temperature", "'temperature' sets nothing"),
        ("=1", "'=1' sets nothing"),
        ("temp=1", "'temp' is nothing to set; allowed: temperature"),
        ("logprobs=3", "'logprobs' is nothing to set"),
        ("top_p=2", "top_p is 2; allowed: above 0"),
        ("top_p=half", "top_p is 'half'"),
        ("top_k=1.5", "top_k is 1.5"),
        ("temperature=nan", "temperature is nan"),
    ],
)
def test_wrong_words(word: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        assignments(["min_p=0.1", word])
    assert said in str(raised.value)


def test_the_names_are_those_of_the_params() -> None:
    assert {field.name for field in fields(SamplingParams)} > set(NAMES)
