from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_tui.blocks import BlockSplitter, is_list

LINES = [
    "",
    "",
    "text",
    "  indented",
    "    code",
    "- item",
    "1. one",
    "2) two",
    "```",
    "```py",
    "~~~",
    "# head",
    "> q",
]


def cuts(text: str, size: int = 1) -> tuple[list[str], str]:
    """The closed parts, and what is open, of a text fed in pieces of that size."""
    splitter = BlockSplitter()
    closed = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)]
    return [part for part in closed if part], splitter.open


@given(st.lists(st.sampled_from(LINES)).map("\n".join), st.integers(1, 20))
def test_nothing_is_lost_and_pieces_do_not_matter(text: str, size: int) -> None:
    closed, rest = cuts(text, size)
    assert "".join(closed) + rest == text
    by_character = cuts(text)
    assert ("".join(closed), rest) == ("".join(by_character[0]), by_character[1])


@pytest.mark.parametrize(
    ("text", "closed", "rest"),
    [
        ("one", [], "one"),
        ("one\n", [], "one\n"),
        ("one\n\n", [], "one\n\n"),
        ("one\n\nt", ["one\n\n"], "t"),
        ("- a\n\n-", [], "- a\n\n-"),
        ("- a\n\n-- no item", [], "- a\n\n-- no item"),
        ("- a\n\nb", ["- a\n\n"], "b"),
        ("one\n\ntwo\n", ["one\n\n"], "two\n"),
        ("one\nstill one\n\ntwo\n", ["one\nstill one\n\n"], "two\n"),
        ("```\na\n\nb\n```\n", ["```\na\n\nb\n```\n"], ""),
        ("text\n```\na\n", ["text\n"], "```\na\n"),
        ("````\n```\n````\n", ["````\n```\n````\n"], ""),
        ("- a\n\n- b\n\n  more of b\n", [], "- a\n\n- b\n\n  more of b\n"),
        ("- a\n\n- b\n\nafter\n", ["- a\n\n- b\n\n"], "after\n"),
        ("- a\n\n  ```\n  code\n\n  ```\n- b\n", [], "- a\n\n  ```\n  code\n\n  ```\n- b\n"),
        ("steps:\n1. a\n2. b\n", ["steps:\n"], "1. a\n2. b\n"),
        ("in the year\n1984. No list\n", [], "in the year\n1984. No list\n"),
    ],
)
def test_where_it_cuts(text: str, closed: list[str], rest: str) -> None:
    assert cuts(text) == (closed, rest)


def test_fence_is_known_while_it_is_open() -> None:
    splitter = BlockSplitter()
    splitter.feed("```py\nx = 1\n")
    assert splitter.in_fence
    splitter.feed("```\n")
    assert not splitter.in_fence


def test_is_list() -> None:
    assert is_list("- a\n")
    assert is_list("12. a\n")
    assert not is_list("text\n- a\n")
