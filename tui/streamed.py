"""Markdown that is being written, at a cost a token that does not grow with its length."""

from __future__ import annotations

from textual.containers import Vertical
from textual.content import Content

from .block import CodeBlock, MarkdownBlock
from .blocks import BlockSplitter, is_list
from .markup import Fence, Paragraph, parts_of
from .once import LaidOutOnce

_ROOM = 40  # paragraphs that one widget holds: a layout visits every widget, an append wraps one anew
_PARSED = 2000  # characters of an open block that are parsed at each flush; a longer one is bare text
_FROZEN_LINES = 16  # lines of a longer one that are put aside, so that only its end is drawn again


class StreamedMarkdown(LaidOutOnce, Vertical):
    """Closed blocks stand for good; the open one, below them, is drawn anew with each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.source = ""
        self._splitter = BlockSplitter()
        self._after_list = False
        self._frozen = 0  # characters of the open block that stand in frozen widgets
        self._open: list[MarkdownBlock] = []  # the open block, the last of them still changing

    async def feed(self, text: str) -> None:
        """Add sanitized text."""
        self.source += text
        closed = self._splitter.feed(text)
        if closed:
            await self._close(closed)
        if self._splitter.visible.strip():
            await self._show_open(self._splitter.visible)

    async def finish(self) -> None:
        """Close the last block, too."""
        rest, self._splitter = self._splitter.open, BlockSplitter()
        await self._close(rest)

    async def _close(self, text: str) -> None:
        with self.app.batch_update():
            await self.remove_children(self._open)
            self._open.clear()
            self._frozen = 0
            goes_on = self._goes_on(text)
            for part in parts_of(text):
                await self._add(part, goes_on)
                goes_on = False
            if text.strip():
                self._after_list = is_list(text)

    async def _add(self, part: list[Paragraph] | Fence, goes_on: bool) -> None:
        """Put a closed part below the others; `goes_on` without a blank line before it."""
        last = self.children[-1] if self.children else None
        if isinstance(part, Fence):
            await self.mount(CodeBlock(part))
        elif isinstance(last, MarkdownBlock) and len(last.paragraphs) < _ROOM:
            between = [] if goes_on else [Paragraph(Content(""))]
            last.put([*last.paragraphs, *between, *part])
        else:
            await self.mount(_block(part, goes_on))

    def _goes_on(self, text: str) -> bool:
        """A list that was cut as it is long."""
        return self._after_list and is_list(text)

    # The open block

    async def _show_open(self, text: str) -> None:
        if not self._open:
            await self._add_piece(goes_on=self._goes_on(text))
        if len(text) <= _PARSED and not self._splitter.in_fence:
            self._open[-1].put(_lines(text))
        else:
            await self._show_bare(text)

    async def _show_bare(self, text: str) -> None:
        while aside := self._settled(text[self._frozen :]):
            end = self._frozen + aside
            self._update_piece(text[self._frozen : end])
            self._frozen = end
            await self._add_piece(goes_on=True)
        self._update_piece(text[self._frozen :])

    def _settled(self, live: str) -> int:
        """Characters at the start of the live text that can be put aside; 0 where it is not long."""
        if live.count("\n") > 2 * _FROZEN_LINES:
            return sum(len(line) + 1 for line in live.split("\n", _FROZEN_LINES)[:_FROZEN_LINES])
        return 0

    async def _add_piece(self, *, goes_on: bool) -> None:
        self._open.append(_block([], goes_on))
        await self.mount(self._open[-1])

    def _update_piece(self, text: str) -> None:
        piece = self._open[-1]
        piece.set_class(self._splitter.in_fence, "code")
        if self._splitter.in_fence and len(self._open) == 1:
            text = text.partition("\n")[2]  # without the fence line
        piece.put([Paragraph(Content(text.removesuffix("\n")))])


def _lines(text: str) -> list[Paragraph]:
    lines: list[Paragraph] = []
    for part in parts_of(text):
        lines += part if isinstance(part, list) else [_code(part)]
    return lines


def _code(fence: Fence) -> Paragraph:
    """Code within a list, as long as that is open."""
    indent = Content(" " * 3 * min(fence.depth, 1))
    return Paragraph(Content.styled(fence.code.rstrip("\n"), "$text on $surface"), indent, indent)


def _block(paragraphs: list[Paragraph], goes_on: bool) -> MarkdownBlock:
    block = MarkdownBlock(paragraphs)
    block.set_class(goes_on, "-goes-on")
    return block
