"""What a card may say: one line that names the file for whatever else; every card against its schema."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

import pytest

from ferrum_mlx.card_schema import check_together, parse
from ferrum_mlx.catalog import Card, HubSource, KVShape, PypiSource, ResolvedModel, cards, default_card
from ferrum_mlx.errors import ModelFileError
from ferrum_mlx.gguf import GGUFFile

CARD = """
alias = "tiny-1b"
title = "Tiny 1B"
licence = "MIT"
family = "llama"
context = 100
parameters = 1000
kv = [{ layers = 2, heads = 1, head_dim = 8 }, { layers = 3, heads = 1, head_dim = 4, window = 10 }]

[sampling]
temperature = 0.5
top_k = 20

[[sources]]
kind = "hub"
repo = "tiny/one"

[[sources]]
kind = "hub"
variant = "gguf"
repo = "tiny/one-GGUF"
file = "one.gguf"
size = 10
"""


def test_a_card() -> None:
    card = parse(CARD, "tiny-1b.toml")
    assert card.kv == (
        KVShape(layers=2, heads=1, head_dim=8),
        KVShape(layers=3, heads=1, head_dim=4, window=10),
    )
    assert card.sources == (
        HubSource(repo="tiny/one"),
        HubSource(repo="tiny/one-GGUF", variant="gguf", file="one.gguf", size=10),
    )
    assert card.variants == ("safetensors", "gguf")
    assert card.sampling == {"temperature": 0.5, "top_k": 20}
    assert not card.verified  # unless it says so
    # 2 · layers · heads · size · 2 bytes, of 4 tokens; of 50 the windows keep 10
    assert card.kv_bytes(4) == 4 * 2 * 2 * (2 * 8 + 3 * 4)
    assert card.kv_bytes(50, 4) == 4 * 2 * (2 * 8 * 50 + 3 * 4 * 10)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("context = 100", "context = ", "tiny-1b.toml is no TOML"),
        ("context = 100", "contxt = 100", "tiny-1b.toml has the key 'contxt'; allowed: alias, title"),
        ("context = 100", "", "tiny-1b.toml has no context"),
        ("context = 100", 'context = "100"', "context is '100'; a whole number is expected"),
        ("context = 100", "context = true", "context is True; a whole number is expected"),
        ("context = 100", "context = -1", "context is -1; a number above 0 is expected"),
        ('title = "Tiny 1B"', 'title = ""', "title is ''; a text that is not empty is expected"),
        ('title = "Tiny 1B"', "title = 1", "title is 1; a text is expected"),
        ('alias = "tiny-1b"', 'alias = "Tiny"', "alias is 'Tiny'; lower case"),
        ('alias = "tiny-1b"', 'alias = "other"', "tiny-1b.toml is the card of other"),
        ('licence = "MIT"', 'licence = "MIT"\nthinking = "often"', "thinking is 'often'"),
        (
            'licence = "MIT"',
            'licence = "MIT"\nverified = "yes"',
            "verified is 'yes'; true or false is expected",
        ),
        ("top_k = 20", "top_q = 20", "tiny-1b.toml: sampling: "),
        ("temperature = 0.5", "temperature = -1", "tiny-1b.toml: sampling: temperature is -1"),
        ("head_dim = 8", "head_size = 8", "tiny-1b.toml, kv 1 has the key 'head_size'"),
        ("head_dim = 4,", "", "tiny-1b.toml, kv 2 has no head_dim"),
        (
            'kind = "hub"\nrepo',
            'kind = "ftp"\nrepo',
            "tiny-1b.toml, source 1: kind is 'ftp'; allowed: hub, pypi",
        ),
        ('kind = "hub"\nrepo', "repo", "tiny-1b.toml, source 1: kind is None"),
        ('repo = "tiny/one"', 'repo = "../one"', "source 1: repo is '../one'; owner/name is expected"),
        (
            'repo = "tiny/one"',
            f'repo = "tiny/one"\nsha256 = "{"0" * 64}"',
            "source 1 has a sha256, but no file that it is of; file and sha256, or neither",
        ),
        (
            'repo = "tiny/one"',
            'repo = "tiny/one"\nvariant = "gguf"\nfile = "m.gguf"\nsha256 = "abc"',
            "source 1: sha256 is 'abc'; 64 hexadecimal",
        ),
        ('variant = "gguf"', 'variant = "awq"', "source 2: variant is 'awq'"),
        (
            'variant = "gguf"',
            "",
            "source 2: file is 'one.gguf'; a .gguf file for the variant gguf, else none",
        ),
        ('file = "one.gguf"', 'file = "../one.gguf"', "source 2: file is '../one.gguf'"),
        ('file = "one.gguf"', "", "source 2: file is ''"),
    ],
)
def test_what_is_wrong_is_named_on_one_line(old: str, new: str, said: str) -> None:
    assert old in CARD
    with pytest.raises(ModelFileError) as caught:
        parse(CARD.replace(old, new, 1), "tiny-1b.toml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sources", ["", "sources = 1", "sources = []", 'sources = ["tiny/one"]'])
def test_a_card_without_sources(sources: str) -> None:
    text = CARD.partition("[sampling]")[0]
    with pytest.raises(ModelFileError, match=r"sources is .* a list of tables is expected"):
        parse(text + sources, "tiny-1b.toml")


def _cards() -> list[Card]:
    card = parse(CARD, "tiny-1b.toml")
    draft = HubSource(repo="tiny/draft")
    return [
        replace(card, default=True),
        replace(card, alias="tiny-8b", parameters=8000, draft="tiny-1b", sources=(draft,)),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a, b: [a, b, replace(b, default=False)], "two cards have the alias 'tiny-8b'"),
        (lambda a, b: [a, replace(b, sources=a.sources)], "tiny-1b and tiny-8b both have tiny/one"),
        (lambda a, b: [a, replace(b, draft="tiny-2b")], "tiny-8b.toml names the draft 'tiny-2b'"),
        (lambda a, b: [replace(a, parameters=9000), b], "its draft tiny-1b is no smaller model"),
        (lambda a, b: [replace(a, default=False), b], "0 cards say default = true"),
        (lambda a, b: [a, replace(b, default=True)], "2 cards say default = true"),
    ],
)
def test_cards_that_contradict_each_other(change: Callable[[Card, Card], list[Card]], said: str) -> None:
    check_together(_cards())
    with pytest.raises(ModelFileError, match=said):
        check_together(change(*_cards()))


@pytest.mark.parametrize("alias", list(cards()))
def test_every_card(alias: str) -> None:
    file = f"{alias}.toml"
    card = parse(resources.files("ferrum_models").joinpath(file).read_text(encoding="utf-8"), file)
    assert card == cards()[alias]
    assert card.parameters
    assert card.kv_bytes(4096) > 0
    assert card.variants[0] == "safetensors"
    hubs = [source for source in card.sources if isinstance(source, HubSource)]
    assert all(source.size for source in hubs if source.sha256)
    for source in hubs:  # a file cannot be smaller than two bits a weight, nor larger than 32
        if source.size and not card.notes:
            assert card.parameters / 4 < source.size < card.parameters * 4


def test_the_verified_card_is_its_file(smollm2: ResolvedModel) -> None:
    card, gguf = default_card(), GGUFFile(smollm2.path)
    assert card.verified
    assert [each.alias for each in cards().values() if each.verified] == [card.alias]
    assert card.parameters == sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    (kv,) = card.kv
    heads = gguf.get("llama.attention.head_count", int)
    assert kv == KVShape(
        layers=gguf.get("llama.block_count", int),
        heads=gguf.get("llama.attention.head_count_kv", int),
        head_dim=gguf.get("llama.embedding_length", int) // heads,
    )
    assert card.context == gguf.get("llama.context_length", int)
    wheel = next(source for source in card.sources if isinstance(source, PypiSource))
    assert wheel.size == smollm2.path.stat().st_size
