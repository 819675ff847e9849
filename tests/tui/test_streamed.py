"""Streamed Markdown ends up as the same text written at once, and costs no more where it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual._compositor import Compositor
from textual.app import App
from textual.containers import Vertical
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection
from textual.widget import Widget
from textual.widgets import Static

from ferrum_mlx.chat.conversation import Message
from ferrum_tui import streamed as streamed_module
from ferrum_tui.answer import Answer
from ferrum_tui.block import CodeBlock, MarkdownBlock
from ferrum_tui.markup import Part, parts_of
from ferrum_tui.streamed import StreamedMarkdown
from ferrum_tui.transcript import Transcript

from . import made_markdown

_SETTLED_S = 0.1  # a screen draws 60 times a second
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
    "empty quote": ">\n\nafter\n",
    "markup-like": "a [bold] b [/0] list[int] [link](http://x.y)\n\n[/]\n",
    "many": "".join(f"Paragraph {i}.\n\n" for i in range(40)),
    "200 items": "".join(f"{i}. item {i}\n" for i in range(1, 201)),
}


class Page(App[None]):
    CSS_PATH = "../../tui/css/markdown.tcss"

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.widget = widget
        self.opened: list[str] = []

    def compose(self):  # type: ignore[no-untyped-def]
        with Vertical():
            yield self.widget

    def action_open_link(self, address: str) -> None:
        self.opened.append(address)


class TranscriptPage(App[None]):
    CSS_PATH = ["../../tui/css/transcript.tcss", "../../tui/css/markdown.tcss"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.transcript = Transcript()

    def compose(self):  # type: ignore[no-untyped-def]
        yield self.transcript


def shown(parts: Sequence[Widget]) -> list[tuple[str, str]]:
    """The kind and text of each line, or block of code, on screen."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CodeBlock):
            found.append((f"code {part.border_title}", part.code))
        else:
            assert isinstance(part, MarkdownBlock)
            found += [("line", line) for line in part.render().plain.split("\n")]
    return [line for line in found if line != ("line", "")]


async def streamed(text: str, size: int) -> list[tuple[str, str]]:
    widget = StreamedMarkdown()
    async with Page(widget).run_test(size=(80, 24)) as pilot:
        for i in range(0, len(text), size):
            await widget.feed(text[i : i + size])
        await widget.finish()
        await pilot.pause()
        return shown(widget.children)


async def at_once(text: str) -> list[tuple[str, str]]:
    """The text as it is parsed in one piece."""
    widget = Vertical()
    async with Page(widget).run_test(size=(84, 24)) as pilot:
        for part in parts_of(text):
            await widget.mount(MarkdownBlock(part) if isinstance(part, list) else CodeBlock(part))
        widget.styles.padding = (0, 4, 0, 0)
        await pilot.pause()
        return shown(widget.children)


def seen(widget: StreamedMarkdown) -> list[str]:
    """The lines that stand on the screen, whatever they are drawn as; blank ones left out."""
    found: list[str] = []
    for child in widget.children:
        if isinstance(child, CodeBlock):
            found += child.code.split("\n")
        else:
            assert isinstance(child, MarkdownBlock)
            found += child.render().plain.split("\n")
    return [line.strip() for line in found if line.strip()]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(made_markdown.text, st.integers(1, 40))
async def test_what_is_seen_while_it_comes_is_what_stays(text: str, size: int) -> None:
    """Before `finish`, and not only behind it; which is also what the whole text says."""
    widget, whole = StreamedMarkdown(), StreamedMarkdown()
    async with Page(widget).run_test(size=(80, 24)) as pilot:
        await pilot.app.query_one(Vertical).mount(whole)
        for i in range(0, len(text), size):
            await widget.feed(text[i : i + size])
        await pilot.pause()
        before = seen(widget)
        await widget.finish()
        await pilot.pause()
        assert before == seen(widget)
        for part in parts_of(text):
            await whole.mount(MarkdownBlock(part) if isinstance(part, list) else CodeBlock(part))
        await pilot.pause()
        assert before == seen(whole)


async def test_inline_code_with_three_ticks_is_seen_as_it_comes() -> None:
    widget = StreamedMarkdown()
    async with Page(widget).run_test(size=(80, 24)) as pilot:
        await widget.feed("```x``` is inline code\n\n- a\n\nand m")
        await pilot.pause()
        assert seen(widget) == ["x is inline code", "• a", "and m"]


async def test_what_is_seen_notices_what_is_missing() -> None:
    widget = StreamedMarkdown()
    async with Page(widget).run_test() as pilot:
        await widget.feed("one\n\n```py\nx = 1\n``")
        await pilot.pause()
        assert seen(widget) == ["one", "x = 1", "``"]
        await widget.feed("`")
        assert seen(widget) == ["one", "x = 1"]
        await widget._open[-1].remove()
        assert seen(widget) == ["one"]


@pytest.mark.parametrize("name", SAMPLES)
async def test_streamed_equals_written_at_once(name: str) -> None:
    text = SAMPLES[name]
    expected = await at_once(text)
    for size in (1, 7, 1000) if len(text) < 500 else (7,):
        assert await streamed(text, size) == expected


async def test_the_comparison_sees_a_difference() -> None:
    assert await at_once("- a\n") != await at_once("1. a\n")
    assert await at_once("a\n\nb\n") != await at_once("a b\n")
    assert await at_once("```\na\n```\n") != await at_once("a\n")


async def test_the_open_block_is_shown_as_it_comes() -> None:
    widget = StreamedMarkdown()
    async with Page(widget).run_test() as pilot:
        await widget.feed("done\n\nbeing [writ")
        await widget.feed("ten] **now**\n- an it")
        await pilot.pause()
        assert [line for _, line in shown(widget.children)] == ["done", "being [written] now", "• an it"]


async def test_an_open_fence_looks_like_code() -> None:
    widget = StreamedMarkdown()
    async with Page(widget).run_test() as pilot:
        await widget.feed("```python\nx = 1\ny")
        await pilot.pause()
        (piece,) = widget.query(".code").results(MarkdownBlock)
        assert piece.render().plain == "x = 1\ny"
        assert piece.has_class("code")


async def test_a_selection_is_the_text_and_not_its_lines_on_screen() -> None:
    paragraph = "A paragraph that is wrapped, in so few columns, more than once."
    code = "def f():\n    x = [1, 2]\n\n    return x  # longer than the screen is wide"
    widget = StreamedMarkdown()
    page = Page(widget)
    async with page.run_test(size=(24, 40)) as pilot:
        await widget.feed(f"{paragraph}\n\n- {paragraph}\n\n```python\n{code}\n```\n\n{paragraph}")
        await pilot.pause()
        await pilot.mouse_down(offset=(2, 0))
        await pilot.hover(offset=(23, 39))
        await pilot.mouse_up(offset=(23, 39))
        selected = page.screen.get_selected_text()
        assert selected == f"{paragraph}\n\n• {paragraph}\n{code}\n{paragraph}"


async def test_a_selection_within_open_code_has_its_blank_lines() -> None:
    widget = StreamedMarkdown()
    async with Page(widget).run_test() as pilot:
        await widget.feed("```\na\n\nb\n\n\nc")
        await pilot.pause()
        (piece,) = widget.query(".code").results(MarkdownBlock)
        for first in range(6):
            for last in range(first, 6):
                selected = piece.get_selection(Selection(Offset(0, first), Offset(1, last)))
                assert selected is not None
                assert selected[0] == "\n".join(["a", "", "b", "", "", "c"][first : last + 1])


# What a flush costs


class Work:
    """What flushes do: characters parsed, and paragraphs or lines put on screen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parsed = self.put = 0
        put, update = MarkdownBlock.put, Static.update

        def counting_parts(text: str) -> list[Part]:
            self.parsed += len(text)
            return parts_of(text)

        def counting_put(block: MarkdownBlock, paragraphs) -> None:  # type: ignore[no-untyped-def]
            self.put += len(paragraphs)
            put(block, paragraphs)

        def counting_update(static: Static, content="", **more) -> None:  # type: ignore[no-untyped-def]
            self.put += str(content).count("\n") + 1
            update(static, content, **more)

        monkeypatch.setattr(streamed_module, "parts_of", counting_parts)
        monkeypatch.setattr(MarkdownBlock, "put", counting_put)
        monkeypatch.setattr(Static, "update", counting_update)

    async def most(self, text: str, size: int = 12) -> tuple[int, int, int]:
        """The most of either in one of the last flushes of a text; how many widgets there are then."""
        widget = StreamedMarkdown()
        most = [0, 0]
        async with Page(widget).run_test():
            for at in range(0, len(text), size):
                self.parsed = self.put = 0
                await widget.feed(text[at : at + size])
                if at > len(text) - 40 * size:
                    most = [max(most[0], self.parsed), max(most[1], self.put)]
            return most[0], most[1], len(widget.query("*"))


LONG = {
    "paragraphs": ("", "A line of text.\n\n"),
    "a list": ("", "- an item\n"),
    "a nested list": ("", "1. an item\n   - below\n"),
    "code": ("```py\n", "    x = 1\n"),
    "a table": ("| a | b |\n|---|---|\n", "| one | two |\n"),
    "a quote": ("", "> a line of a quote\n"),
}


@pytest.mark.parametrize("kind", LONG)
async def test_the_work_of_a_flush_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, line = LONG[kind]
    parsed, put, widgets = await Work(monkeypatch).most(before + line * 400)
    assert parsed <= 2_100
    assert put <= 130
    assert widgets <= 40


async def test_the_count_sees_work_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_module, "_PARSED", 10**9)
    parsed, put, _ = await Work(monkeypatch).most("> a line of a quote\n" * 150)
    assert parsed > 2_100
    assert put <= 130  # it is one paragraph


class Layouts:
    """How often all was laid out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        reflow = Compositor.reflow

        def counting(compositor, parent, size):  # type: ignore[no-untyped-def]
            self.count += 1
            return reflow(compositor, parent, size)

        monkeypatch.setattr(Compositor, "reflow", counting)

    async def of(self, pilot: Pilot[None], answer: Answer, text: str) -> int:
        """Of a flush of this text."""
        await self._settle(pilot)
        before = self.count
        await answer.add(text)
        await self._settle(pilot)
        return self.count - before

    async def _settle(self, pilot: Pilot[None]) -> None:
        seen = -1
        while seen != self.count:
            seen = self.count
            await asyncio.sleep(_SETTLED_S)
            await pilot.pause()


@pytest.mark.parametrize("before", ["A line of text, and", "```py\nx = 1\ny =", "- an item, and"])
@pytest.mark.parametrize("lines", [2, 60])
async def test_a_flush_lays_out_once_and_only_for_a_new_row(
    before: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind so many lines that there is no scrollbar, or one."""
    layouts, page = Layouts(monkeypatch), TranscriptPage()
    answer = Answer(Message(id=1, parent=None, role="assistant"))
    async with page.run_test(size=(80, 24)) as pilot:
        await page.transcript.add(answer)
        await answer.add("one more\n\n" * lines + before)
        assert await layouts.of(pilot, answer, " 2") == 0
        assert await layouts.of(pilot, answer, "\n  z = 3") == 1
        monkeypatch.setattr(MarkdownBlock, "virtual_size", Widget.virtual_size)
        assert await layouts.of(pilot, answer, "\n  z = 4") == 2  # as Textual has it
