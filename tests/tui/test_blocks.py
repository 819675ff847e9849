from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_tui.blocks import BlockSplitter, is_list
from ferrum_tui.markup import Fence, Paragraph, parts_of
from ferrum_tui.table import Table

from . import made_markdown

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


def lines(text: str) -> list[str]:
    """What a text says once it is parsed, without its blank lines."""
    found: list[str] = []
    for part in parts_of(text):
        if isinstance(part, Fence):
            found += [f"code: {line}" for line in part.code.split("\n") if line]
        else:
            found += [line for paragraph in part for line in said(paragraph).split("\n")]
    return [line for line in found if line.strip()]


def said(paragraph: Paragraph) -> str:
    content = paragraph.content
    if isinstance(content, Table):
        return f"table: {[[cell.plain for cell in row] for row in content.rows]}"
    return paragraph.first.plain + content.plain


@settings(max_examples=500, deadline=None, derandomize=True)
@given(made_markdown.text, st.integers(1, 20))
def test_what_is_cut_says_what_the_whole_says(text: str, size: int) -> None:
    """At every moment: a text may end anywhere, as one does that is being written."""
    closed, rest = cuts(text, size)
    assert [line for part in (*closed, rest) for line in lines(part)] == lines(text)


@pytest.mark.parametrize(
    "text",
    [
        "```x``` is inline code\n\n- a\n- b\n\nand more\n",
        "```\n    ```\n* * *\n```\n",  # too far in to close it
        "- ```py\n  x\n  ```\n\n# after\n\n```\ny\n",
        "1. run\n   ```sh\n   ls\nand after, the fence is over\n\n- a\n\nend\n",
        "- a\n" * 13 + "# over\ntext\n-\n- no item, and then one\n",
        "- a\n" * 13 + "# over\ntext\n2) no item\n",
        "* * *\n  ```\nx\n\n> q\n",
    ],
)
def test_what_was_cut_wrongly_once(text: str) -> None:
    for end in range(len(text) + 1):
        closed, rest = cuts(text[:end])
        assert [line for part in (*closed, rest) for line in lines(part)] == lines(text[:end])


def test_the_comparison_sees_a_wrong_cut() -> None:
    assert lines("```\na\n") + lines("# b\n") != lines("```\na\n# b\n")
    assert lines("- a\n") + lines("  more\n") != lines("- a\n  more\n- b\n")


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
