"""The widgets of an answer's blocks: wrapping, copying, colours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual import on
from textual.app import App
from textual.content import Content
from textual.geometry import Offset
from textual.selection import Selection
from textual.widget import Widget

from ferrum_tui.block import CodeBlock, MarkdownBlock
from ferrum_tui.markup import Fence, Paragraph, parts_of


class Page(App[None]):
    CSS_PATH = "../../tui/css/markdown.tcss"

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.widget = widget
        self.opened: list[str] = []
        self.copied: list[str] = []

    def compose(self):  # type: ignore[no-untyped-def]
        yield self.widget

    def action_open_link(self, address: str) -> None:
        self.opened.append(address)

    @on(CodeBlock.Copy)
    def _copy(self, event: CodeBlock.Copy) -> None:
        self.copied.append(event.code)


def block(text: str) -> MarkdownBlock:
    (part,) = parts_of(text)
    assert isinstance(part, list)
    return MarkdownBlock(part)


WORDS = st.lists(st.text(alphabet="ab漢😀", min_size=1, max_size=30), min_size=1, max_size=20)


@settings(max_examples=60)
@given(WORDS.map(" ".join), st.integers(10, 60))
def test_a_wrapped_paragraph_is_copied_as_it_was(text: str, width: int) -> None:
    made = MarkdownBlock([Paragraph(Content(text), Content("• "), Content("  "))])
    rows = made._rows_at(width)
    assert all(row.line.cell_length <= width for row in rows)
    assert made.get_selection(Selection(None, None)) == (f"• {text}", "\n")


def test_a_part_of_a_selection() -> None:
    made = block("- one two three four\n")
    assert [row.line.plain for row in made._rows_at(11)] == ["• one two", "  three", "  four"]
    selection = Selection(Offset(6, 0), Offset(6, 1))
    assert made.get_selection(selection) == ("two thre", "\n")


async def test_it_is_wrapped_anew_at_another_width() -> None:
    page = Page(block("- one two three four five six\n"))
    async with page.run_test(size=(40, 10)) as pilot:
        assert page.widget.size.height == 1
        await pilot.resize_terminal(12, 10)
        await pilot.pause()
        assert page.widget.size.height == 3


async def test_a_click_opens_a_link_and_only_there() -> None:
    page = Page(block("see [the page](https://x.y/a?b=1&c='2') now"))
    async with page.run_test(size=(60, 10)) as pilot:
        await pilot.click(offset=(1, 0))
        assert page.opened == []
        await pilot.click(offset=(6, 0))
        assert page.opened == ["https://x.y/a?b=1&c='2'"]


async def test_code_is_copied_by_key_and_by_a_click_on_its_border() -> None:
    code = "def f():\n\treturn 1\n"
    page = Page(CodeBlock(Fence(code, "python")))
    async with page.run_test(size=(40, 10)) as pilot:
        await pilot.click(offset=(5, 1))
        assert page.copied == []
        await pilot.press("y")
        await pilot.click(offset=(30, 3))
        assert page.copied == [code, code]


async def test_a_tab_moves_no_colours() -> None:
    widget = CodeBlock(Fence("if x:\n\tcall('a')\n", "python"))
    async with Page(widget).run_test():
        shown = widget.content
        assert isinstance(shown, Content)
        assert shown.plain == "if x:\n    call('a')"
        assert "call" in {shown.plain[span.start : span.end] for span in shown.spans}


@pytest.mark.parametrize("code", ["x[/]y [bold] = list[int]", "x" * 20_001])
async def test_code_is_never_read_as_markup(code: str) -> None:
    widget = CodeBlock(Fence(code, "no-such-language"))
    async with Page(widget).run_test():
        assert str(widget.content) == code


def colours(page: Page) -> set[str]:
    """The foregrounds on the first line of the block."""
    segments = list(page.widget.render_line(page.widget.gutter.top))
    return {str(segment.style.color.name) for segment in segments if segment.style and segment.style.color}


@pytest.mark.parametrize("widget", [CodeBlock(Fence("if x", "python")), block("- **a** `b`")])
async def test_colours_follow_the_theme(widget: Widget) -> None:
    page = Page(widget)
    async with page.run_test(size=(40, 10)) as pilot:
        seen = []
        for theme in ("textual-dark", "textual-light", "ansi-dark"):
            page.theme = theme
            await pilot.pause()
            seen.append(colours(page))
        assert seen[0] != seen[1] != seen[2]
        assert not any(name.startswith("#") for name in seen[2])
