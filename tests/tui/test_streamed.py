"""Streamed Markdown ends up as the same text written at once would look."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.app import App
from textual.containers import Vertical
from textual.selection import SELECT_ALL
from textual.widget import Widget
from textual.widgets import Static

import ferrum_tui
from ferrum_tui.block import MarkdownBlock
from ferrum_tui.markup import Part, parts_of
from ferrum_tui.streamed import StreamedMarkdown

SAMPLES = {
    "paragraphs": "One *two* **three**.\nSame paragraph.\n\nAnother with `code`.\n",
    "headings": "# Title\n\ntext\n## Sub\ntext right below\n",
    "fence": "Look:\n```python\ndef f():\n\n    return 1\n```\nand after.\n",
    "open fence": "Look:\n\n```\nnever closed\n\nstill code",
    "tight list": "Steps:\n1. one\n2. two\n   more\n3. three\n\nDone.\n",
    "loose list": "- one\n\n- two\n\n  inside two\n\n- three\n\nDone.\n",
    "nested list": "- a\n  - b\n    - c\n- d\n",
    "list with code": "1. run\n\n   ```sh\n   ls\n   ```\n\n2. look\n\nEnd.\n",
    "table": "| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n",
    "quote": "> one\n> two\n\nafter\n\n---\n\nend\n",
    "markup-like": "a [bold] b [/0] list[int] [link](http://x.y)\n\n[/]\n",
    "many": "".join(f"Paragraph {i}.\n\n" for i in range(40)),
}


class Page(App[None]):
    CSS_PATH = Path(ferrum_tui.__file__).parent / "css/markdown.tcss"
    CSS = "StreamedMarkdown { padding: 0; }"

    def __init__(self, *widgets: Widget) -> None:
        super().__init__()
        self.widgets = widgets

    def compose(self):  # type: ignore[no-untyped-def]
        with Vertical():
            yield from self.widgets


def looks(widget: StreamedMarkdown) -> list[str]:
    """The text on screen with its blank lines, whatever widgets it is in."""
    strips = widget.screen._compositor.render_strips()
    lines = [strip.text.rstrip() for strip in strips]
    return "\n".join(lines).rstrip().split("\n")


async def at_once(text: str, size: tuple[int, int] = (60, 90)) -> list[str]:
    return await streamed_in(text, len(text) or 1, size)


async def streamed_in(text: str, chunk: int, size: tuple[int, int] = (60, 90)) -> list[str]:
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test(size=size) as pilot:
        for i in range(0, len(text), chunk):
            await streamed.feed(text[i : i + chunk])
        await streamed.finish()
        await pilot.pause()
        assert not streamed.query(".open-block")
        assert streamed.source == text
        return looks(streamed)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("chunk", [1, 7])
async def test_streamed_equals_written_at_once(name: str, chunk: int) -> None:
    assert await streamed_in(SAMPLES[name], chunk) == await at_once(SAMPLES[name])


# Written down by hand: another way to say what Markdown means.
LOOKS = {
    "paragraphs": ["One two three.", "Same paragraph.", "", "Another with code."],
    "headings": ["Title", "", "text", "", "Sub", "", "text right below"],
    "tight list": ["Steps:", "", "1. one", "2. two", "   more", "3. three", "", "Done."],
    "loose list": ["• one", "• two", "", "  inside two", "• three", "", "Done."],
    "nested list": ["• a", "  ◦ b", "    ▪ c", "• d"],
    "list with code": ["1. run", "   ls", "2. look", "", "End."],
    "table": ["a  b", "─  ─", "1  2", "", "after"],
    "quote": ["▌ one", "▌ two", "", "after", "", "─" * 24, "", "end"],
    "markup-like": ["a [bold] b [/0] list[int] link (http://x.y)", "", "[/]"],
}


@pytest.mark.parametrize("name", LOOKS)
async def test_looks(name: str) -> None:
    assert await at_once(SAMPLES[name]) == LOOKS[name]


async def test_a_code_block_has_its_language_and_its_text() -> None:
    lines = await at_once(SAMPLES["fence"], (30, 20))
    assert lines[0] == "Look:"
    assert "python" in lines[2]
    assert [line.strip("│ ") for line in lines[3:6]] == ["def f():", "", "return 1"]
    assert "y copy" in lines[6]
    assert lines[-1] == "and after."


async def test_wrapped_items_hang_and_are_copied_as_they_were_written() -> None:
    item = "an item of words that are wrapped, 日本語のテキスト too"
    streamed = StreamedMarkdown()
    page = Page(streamed)
    async with page.run_test(size=(20, 12)) as pilot:
        await streamed.feed(f"1. {item}\n2. next\n")
        await streamed.finish()
        await pilot.pause()
        lines = looks(streamed)
        assert lines[0].startswith("1. an item")
        assert all(line.startswith("   ") for line in lines[1:4])
        assert all(cell_len(line) <= 20 for line in lines)
        page.screen.selections = {streamed.query_one(MarkdownBlock): SELECT_ALL}
        assert page.screen.get_selected_text() == f"1. {item}\n2. next"
        await pilot.resize_terminal(90, 12)
        await pilot.pause()
        assert looks(streamed) == [f"1. {item}", "2. next"]


async def test_a_long_list_is_a_few_widgets() -> None:
    items = [f"{i}. item {i}" for i in range(1, 301)]
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test(size=(60, 310)) as pilot:
        for item in items:
            await streamed.feed(item + "\n")
        await streamed.feed("\nAfter.\n")
        await streamed.finish()
        await pilot.pause()
        assert looks(streamed) == [*items, "", "After."]
        assert len(streamed.children) < 12


class Counted:
    """Characters that are parsed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        patch.setattr("ferrum_tui.streamed.parts_of", self)

    def __call__(self, text: str) -> list[Part]:
        self.characters += len(text)
        return parts_of(text)


@pytest.mark.parametrize("line", ["A paragraph.\n\n", "- an item\n", "> a quote\n\n", "1. x\n   - y\n"])
async def test_what_is_parsed_grows_with_the_text_and_not_faster(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    parsed = []
    for lines in (100, 400):
        counted.characters = 0
        streamed = StreamedMarkdown()
        async with Page(streamed).run_test():
            for _ in range(lines):
                await streamed.feed(line)
        parsed.append(counted.characters / lines)
    assert parsed[1] < 1.2 * parsed[0]
    assert sum(i * len(line) for i in range(400)) / 400 > 10 * parsed[1]  # what all of it each time would be


async def test_a_link_opens_at_a_click_if_it_is_one() -> None:
    opened = []

    class Browser(Page):
        def action_open_link(self, address: str) -> None:
            opened.append(address)

    streamed = StreamedMarkdown()
    async with Browser(streamed).run_test() as pilot:
        await streamed.feed("[here](https://e.x/a_b?c='d') [/x]")
        await pilot.pause()
        await pilot.click(offset=(1, 0))
        assert opened == ["https://e.x/a_b?c='d'"]
        assert "here (https://e.x/a_b?c='d') [/x]" in looks(streamed)[0]


async def test_open_block_is_shown_as_it_comes() -> None:
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test() as pilot:
        await streamed.feed("done\n\nbeing [writ")
        await streamed.feed("ten]")
        await pilot.pause()
        block = streamed.query(MarkdownBlock).last()
        assert str(block.render()) == "being [written]"


async def test_open_fence_looks_like_code() -> None:
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test():
        await streamed.feed("```python\nx = 1\ny")
        (piece,) = streamed.query(".open-block").results(Static)
        assert str(piece.content) == "x = 1\ny"
        assert piece.has_class("code")


async def test_a_selection_is_the_text_and_not_its_lines_on_screen() -> None:
    paragraph = "A paragraph that is wrapped, in so few columns, more than once."
    code = "def f():\n    x = [1, 2]\n\n    return x  # longer than the screen is wide"
    streamed = StreamedMarkdown()
    page = Page(streamed)
    async with page.run_test(size=(24, 30)) as pilot:
        await streamed.feed(f"{paragraph}\n\n```python\n{code}\n```\n\n{paragraph}")
        await pilot.pause()
        await pilot.mouse_down(offset=(0, 0))
        await pilot.hover(offset=(23, 29))
        await pilot.mouse_up(offset=(23, 29))
        assert page.screen.get_selected_text() == f"{paragraph}\n{code}\n{paragraph}"


async def test_a_long_open_block_redraws_only_its_end() -> None:
    streamed = StreamedMarkdown()
    lines = [f"line {i}\n" for i in range(200)]
    async with Page(streamed).run_test():
        await streamed.feed("```\n")
        for line in lines:
            await streamed.feed(line)
        pieces = list(streamed.query(".open-block").results(Static))
        assert all(str(piece.content).count("\n") < 40 for piece in pieces)
        assert "\n".join(str(piece.content) for piece in pieces) + "\n" == "".join(lines)
