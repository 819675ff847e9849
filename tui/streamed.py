"""Markdown that is being written, at a cost a token that does not grow with its length."""

from __future__ import annotations

from functools import cache

from markdown_it import MarkdownIt
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Markdown, Static

from .blocks import BlockSplitter, is_list

_BLOCKS = 16  # closed blocks a Markdown widget holds, as each more of them costs at every layout
_LONG_LIST = 40  # lines; a longer list stays text, for Markdown makes several widgets of each item
_FROZEN_LINES = 16  # lines of an open block that are put aside, so that only its end is drawn again


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like")


class StreamedMarkdown(Vertical):
    """Closed blocks stand as Markdown; the open block stands below as bare text until it closes."""

    def __init__(self) -> None:
        super().__init__()
        self._splitter = BlockSplitter()
        self._last_closed: Markdown | None = None  # the last widget of closed blocks
        self._room = 0  # blocks that it still takes
        self._frozen = 0  # characters of the open block that stand in frozen widgets
        self._pieces: list[Static] = []  # the open block, the last of them still changing

    async def feed(self, text: str) -> None:
        """Add sanitized text."""
        closed = self._splitter.feed(text)
        if closed:
            await self._close(closed)
        if self._splitter.open.strip():
            await self._show_text(self._splitter.open)

    async def finish(self) -> None:
        """Show the last block as Markdown, too."""
        rest, self._splitter = self._splitter.open, BlockSplitter()
        await self._close(rest)

    async def _close(self, text: str) -> None:
        with self.app.batch_update():
            if is_list(text) and text.count("\n") > _LONG_LIST:
                await self._show_text(text)
                self._last_closed = None  # what follows goes below the text that stays
            else:
                await self._append(text)
                for piece in self._pieces:
                    await piece.remove()
        self._pieces.clear()
        self._frozen = 0

    async def _append(self, text: str) -> None:
        if self._last_closed is None or not self._room:
            self._last_closed, self._room = Markdown(parser_factory=_parser), _BLOCKS
            await self.mount(self._last_closed)
            if not self._last_closed.is_attached:  # the screen is closing and mounts nothing any more
                self._last_closed = None
                return
        self._room -= 1
        await self._last_closed.append(text)

    async def _show_text(self, text: str) -> None:
        """Show the open block, or one that stays text."""
        if not self._pieces:
            await self._add_piece()
        live = text[self._frozen :]
        while live.count("\n") > 2 * _FROZEN_LINES:
            end = self._frozen
            for _ in range(_FROZEN_LINES):
                end = text.index("\n", end) + 1
            self._update_piece(text[self._frozen : end])
            self._frozen, live = end, text[end:]
            await self._add_piece()
        self._update_piece(live)

    async def _add_piece(self) -> None:
        piece = Static(markup=False, classes="open-block")
        piece.set_class(self._splitter.in_fence, "code")
        self._pieces.append(piece)
        await self.mount(piece)

    def _update_piece(self, text: str) -> None:
        piece = self._pieces[-1]
        piece.set_class(self._splitter.in_fence, "code")
        if self._splitter.in_fence and len(self._pieces) == 1:
            text = text.partition("\n")[2]  # without the fence line
        piece.update(Content(text.removesuffix("\n")))
