"""Where a growing Markdown text can be cut: what is closed for good, and what may still change."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LIST_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])(\s|$)")
_LONG = 12  # lines of a list, after which it is cut before an item
_INTERRUPTING = ("-", "*", "+", "1.", "1)")  # list markers that may follow a paragraph without a blank line


def is_list(block: str) -> bool:
    """Whether a block that was cut off is a list."""
    return _LIST_ITEM.match(block) is not None


class BlockSplitter:
    """Cuts a streamed Markdown text after each block that nothing to come can change.

    What `feed` returned plus `open` is always the whole text. A list is one block, with the blank lines
    and indented parts between its items, or several where it is long, each of whole items. A cut is
    cautious, not a parse: raw HTML may run on behind one.
    """

    def __init__(self) -> None:
        self.open = ""
        self._scanned = 0  # characters of `open` in lines that were looked at
        self._fence = ""  # the marker of the open fence
        self._in_list = False
        self._after_blank = False

    @property
    def in_fence(self) -> bool:
        """`open` is a code fence and nothing else, still being written."""
        return bool(self._fence) and _FENCE.match(self.open) is not None

    def feed(self, text: str) -> str:
        """Add text; returns what became closed, often nothing."""
        self.open += text
        cut = 0
        while (end := self.open.find("\n", self._scanned)) >= 0:
            start, self._scanned = self._scanned, end + 1
            cut = max(cut, self._cut_at(self.open[start:end], start, end + 1))
        if self._next_has_begun(self.open[self._scanned :]):
            cut, self._after_blank, self._in_list = self._scanned, False, False
        closed, self.open = self.open[:cut], self.open[cut:]
        self._scanned -= cut
        return closed

    def _cut_at(self, line: str, start: int, end: int) -> int:
        """How far a text is closed once this line of it, from start to end, is whole."""
        if self._fence:
            if not self._closes_fence(line):
                return 0
            self._fence = ""
            return 0 if self._in_list else end
        if not line.strip():
            self._after_blank = True
            return 0
        after_blank, self._after_blank = self._after_blank, False
        item = _LIST_ITEM.match(line)
        goes_on = line[0] in " \t" or (self._in_list and item)
        starts_list = item and item[1] in _INTERRUPTING and line.strip() != item[1]
        fence = _FENCE.match(line.lstrip() if self._in_list else line)
        if fence:
            self._fence = fence[1]
        if self._in_list and item and line[0] != " " and self._is_long(start):
            return start
        if goes_on or not (after_blank or fence or starts_list):
            self._in_list = self._in_list or item is not None
            return 0
        self._in_list = item is not None
        return start

    def _is_long(self, end: int) -> bool:
        return self.open.count("\n", 0, end) >= _LONG

    def _next_has_begun(self, unfinished: str) -> bool:
        """Whether a line that is not whole yet surely starts a new block."""
        first = unfinished[:1]
        may_go_on = not first.strip() or (self._in_list and (first in "-*+" or first.isdigit()))
        return self._after_blank and not self._fence and not may_go_on

    def _closes_fence(self, line: str) -> bool:
        bare = line.strip()
        return len(bare) >= len(self._fence) and not bare.strip(self._fence[0])
