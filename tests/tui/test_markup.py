"""What Markdown becomes, as plain text on lines and by its styles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from ferrum_tui.block import MarkdownBlock
from ferrum_tui.markup import Fence, Paragraph, code_of, parts_of


def lines(text: str, width: int = 40) -> list[str]:
    """The lines on screen at that width, without code."""
    return [
        row.line.plain.rstrip()
        for part in parts_of(text)
        if not isinstance(part, Fence)
        for row in MarkdownBlock(part)._rows_at(width)
    ]


def content(text: str) -> Content:
    (part,) = parts_of(text)
    assert not isinstance(part, Fence)
    (paragraph,) = part
    assert isinstance(paragraph.content, Content)
    return paragraph.content


def styles(text: str) -> list[tuple[str, str]]:
    """Which text has which style."""
    made = content(text)
    return [(made.plain[span.start : span.end], str(span.style)) for span in made.spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\ntwo\nthree", ["One", "", "two", "three"]),
        ("- a\n- b\n  - c\n    - d\n", ["• a", "• b", "  ◦ c", "    ▪ d"]),
        ("7. a\n7. b\n9) c\n", ["7. a", "7. b", "", "9) c"]),
        ("- a\n\n  more\n- b\n", ["• a", "", "  more", "• b"]),
        ("- [ ] open\n- [x] done\n- [y] no box", ["• ☐ open", "• ☑ done", "• [y] no box"]),
        ("-\n- b", ["•", "• b"]),
        ("> one\n>\n> - two\n", ["▌ one", "▌ • two"]),
        ("> ```\n> code\n>   x\n> ```\n", ["▌ code", "▌   x"]),
        ("a\n\n---\n", ["a", "", "─" * 24]),
        ("<div>\nhtml\n</div>\n", ["<div>", "html", "</div>"]),
        ("a<br>b<BR />c &amp; \\*d\\* <i>", ["a", "b", "c & *d* <i>"]),
        ("[a][1]\n\n[1]: x\n", ["[a][1]", "", "[1]: x"]),
        ("a [bold] b [/0] list[int] [/]", ["a [bold] b [/0] list[int] [/]"]),
        ("![a cat](cat.png)", ["[a cat] (cat.png)"]),
        ("[see](javascript:x)", ["[see](javascript:x)"]),
        ("- " + "word " * 9, ["• word word word word word word word", "  word word"]),
        ("12. 漢字かな" + "漢" * 20, ["12. 漢字かな" + "漢" * 14, "    " + "漢" * 6]),
    ],
)
def test_lines(text: str, expected: list[str]) -> None:
    assert lines(text) == expected


def test_inline_styles() -> None:
    assert styles("a **b** *c* ~~d~~ ***e***") == [
        ("b", "bold"),
        ("c", "italic"),
        ("d", "strike"),
        ("e", "italic bold"),
    ]
    assert styles("`x[0]`") == [("x[0]", "$text-accent on $surface")]


@pytest.mark.parametrize(
    ("text", "plain", "address"),
    [
        ("[here](https://x.y/z)", "here (https://x.y/z)", "https://x.y/z"),
        ("<https://x.y>", "https://x.y", "https://x.y"),
        ("see www.x.org", "see www.x.org (http://www.x.org)", "http://www.x.org"),
        ("<a@x.org>", "a@x.org", "mailto:a@x.org"),
        ("[here](ftp://x.y)", "here (ftp://x.y)", None),
    ],
)
def test_links_show_their_address_and_open_only_what_is_allowed(
    text: str, plain: str, address: str | None
) -> None:
    made = content(text)
    assert made.plain == plain
    metas = [span.style.meta for span in made.spans if not isinstance(span.style, str)]
    assert [meta["@click"] for meta in metas] == ([("app.open_link", (address,))] if address else [])


def test_code_in_a_list_is_a_block_of_its_own() -> None:
    before, code, after = parts_of("1. run\n\n   ```sh -x\n   ls\n     y\n   ```\n\n2. look\n")
    assert code == Fence("ls\n  y\n", "sh", 1)
    for part, plain in ((before, "run"), (after, "look")):
        assert isinstance(part, list)
        assert [paragraph.content for paragraph in part] == [Content(plain)]


def test_code_is_found_wherever_it_is() -> None:
    deep = (
        "".join(f"{'  ' * depth}- x\n" for depth in range(30)) + "\n" + " " * 60 + "```\n" + " " * 60 + "y\n"
    )
    assert code_of("```py\na\n```\n\n    b\n\n> ```\n> c\n> ```\n") == ["a\n", "b\n", "c\n"]
    assert code_of(deep) == ["y\n"]


def test_deep_nesting_loses_no_text() -> None:
    assert lines("> " * 60 + "deep") == ["deep"]  # no room is left for its prefix
    assert lines("> " * 60 + "deep", 140) == ["▌ " * 60 + "deep"]


def test_a_paragraph_is_data() -> None:
    assert parts_of("a") == [[Paragraph(Content("a"))]]


_STARTS = [
    "",
    "",
    "# ",
    "- ",
    "  - ",
    "    - ",
    "3. ",
    "> ",
    "> - ",
    "```",
    "~~~ ",
    "    ",
    "| a | ",
    "|--",
    "<div>",
    "[x]: ",
]


@given(st.lists(st.sampled_from(_STARTS), max_size=14), st.integers(1, 60))
def test_every_word_is_shown(starts: list[str], width: int) -> None:
    words = [f"w{number}w" for number in range(len(starts))]
    text = "\n".join(start + word for start, word in zip(starts, words, strict=True))
    shown = "".join(
        f"{part.language} {part.code}"
        if isinstance(part, Fence)
        else "".join(row.line.plain for row in MarkdownBlock(part)._rows_at(width))
        for part in parts_of(text)
    ).replace("\n", "")
    for word, start in zip(words, starts, strict=True):
        assert word in shown or start in ("```", "~~~ "), text
