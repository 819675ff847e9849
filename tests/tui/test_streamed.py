"""Streamed Markdown ends up as the same text written at once would look."""

from __future__ import annotations

import pytest
from textual.app import App
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Markdown, Static

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
    def __init__(self, *widgets: Widget) -> None:
        super().__init__()
        self.widgets = widgets

    def compose(self):  # type: ignore[no-untyped-def]
        with Vertical():
            yield from self.widgets


def blocks(widget: Widget) -> list[tuple[str, str]]:
    """What stands on screen, block by block."""
    found = []
    for part in widget.query("MarkdownBlock"):
        content = getattr(part, "_content", None)
        found.append((type(part).__name__, content.plain if content is not None else ""))
    return found


async def at_once(text: str) -> list[tuple[str, str]]:
    markdown = Markdown(text)
    async with Page(markdown).run_test() as pilot:
        await pilot.pause()
        return blocks(markdown)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_equals_written_at_once(name: str, size: int) -> None:
    text = SAMPLES[name]
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test() as pilot:
        for i in range(0, len(text), size):
            await streamed.feed(text[i : i + size])
        await streamed.finish()
        await pilot.pause()
        assert blocks(streamed) == await at_once(text)
        assert not streamed.query(".open-block")


def test_the_comparison_sees_a_difference() -> None:
    assert blocks_differ("- a\n", "1. a\n")
    assert blocks_differ("a\n\nb\n", "a b\n")


def blocks_differ(one: str, other: str) -> bool:
    import asyncio

    async def both() -> bool:
        return await at_once(one) != await at_once(other)

    return asyncio.run(both())


async def test_open_block_is_shown_as_it_comes() -> None:
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test():
        await streamed.feed("done\n\nbeing [writ")
        await streamed.feed("ten]")
        (piece,) = streamed.query(".open-block").results(Static)
        assert str(piece.content) == "being [written]"


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


async def test_a_very_long_list_stays_text_in_its_place() -> None:
    items = "".join(f"- item {i}\n" for i in range(300))
    streamed = StreamedMarkdown()
    async with Page(streamed).run_test() as pilot:
        await streamed.feed("Before.\n\n")
        await streamed.feed(items)
        await streamed.feed("\nAfter.\n")
        await streamed.finish()
        await pilot.pause()
        kinds = ["text" if isinstance(part, Static) else "markdown" for part in streamed.children]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("markdown", "markdown", {"text"})
        shown = "\n".join(str(part.content) for part in streamed.query(".open-block").results(Static))
        assert shown.split() == items.split()
