"""Where a growing Markdown text can be cut: what is closed for good, and what may still change."""

from __future__ import annotations

import re

_FENCE = re.compile(
    r" {0,3}(`{3,}(?=[^`\n]*(?:\n|$))|~{3,})"
)  # behind backticks, none in its line: else code
_LIST_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])(\s|$)")
_RULE = re.compile(r" {0,3}([-*])[ \t]*(\1[ \t]*){2,}$")  # "* * *" is no item
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
        self._in_item = False  # that one is, and ends with the item
        self._indent = 0  # columns before the text of the list's last item
        self._in_list = False
        self._sure = False  # of the list: what has closed it may have gone unnoticed, and then "2." is text
        self._empty = False  # the last line is an item without a text, which a blank line ends
        self._begins = True  # the next line is the first of a block
        self._after_blank = False

    @property
    def in_fence(self) -> bool:
        """`open` is a code fence and nothing else, still being written."""
        return bool(self._fence) and _FENCE.match(self.open) is not None

    @property
    def visible(self) -> str:
        """`open` without a fence's end that is no whole line yet."""
        unfinished = self.open[self._scanned :]
        return self.open[: self._scanned] if self._fence and self._closes_fence(unfinished) else self.open

    def feed(self, text: str) -> str:
        """Add text; returns what became closed, often nothing."""
        self.open += text
        cut = 0
        while (end := self.open.find("\n", self._scanned)) >= 0:
            start, self._scanned = self._scanned, end + 1
            cut = max(cut, self._cut_at(self.open[start:end], start, end + 1))
        if self._next_has_begun(self.open[self._scanned :]):
            cut, self._after_blank, self._in_list, self._begins = self._scanned, False, False, True
        closed, self.open = self.open[:cut], self.open[cut:]
        self._scanned -= cut
        return closed

    def _cut_at(self, line: str, start: int, end: int) -> int:
        """How far a text is closed once this line of it, from start to end, is whole."""
        if self._in_item and line.strip() and _indent(line) < self._indent:
            self._fence, self._in_item, self._after_blank = "", False, True
        if self._fence:
            if not self._closes_fence(line):
                return 0
            self._in_item = False
            self._fence = ""
            self._begins = not self._in_list
            return 0 if self._in_list else end
        if not line.strip():
            self._after_blank = True
            self._sure = self._sure and not self._empty
            return 0
        after_blank, self._after_blank = self._after_blank, False
        begins, self._begins = self._begins or after_blank, False
        item = None if _RULE.match(line) else _LIST_ITEM.match(line)
        goes_on = line[0] in " \t" or (self._in_list and item)
        starts_list = item and item[1] in _INTERRUPTING and line.strip() != item[1]
        self._empty = item is not None and not line[item.end() :].strip()
        if item:
            goes_deeper = self._in_list and self._sure and _indent(line) >= self._indent
            self._indent = self._indent if goes_deeper else _text_column(line, item)
            self._sure = bool(begins or starts_list or (self._in_list and self._sure))
        elif _indent(line) < self._indent:
            self._sure = False
        fence = self._opens_fence(line, item)
        if self._in_list and item and self._sure and line[0] != " " and self._is_long(start):
            return start
        if goes_on or not (after_blank or fence or starts_list):
            self._in_list = self._in_list or item is not None
            return 0
        self._in_list = item is not None
        return start

    def _opens_fence(self, line: str, item: re.Match[str] | None) -> bool:
        """Whether a line is, or the item that begins in it begins with, the start of a fence."""
        behind = line[item.end() :] if item and self._sure else line
        fence = _FENCE.match(behind.lstrip() if self._in_list or behind is not line else line)
        if fence:
            self._fence = fence[1]
            in_list = self._in_list and self._sure and _indent(line) >= self._indent
            self._in_item = self._sure = behind is not line or in_list
        return fence is not None and behind is line

    def _is_long(self, end: int) -> bool:
        return self.open.count("\n", 0, end) >= _LONG

    def _next_has_begun(self, unfinished: str) -> bool:
        """Whether a line that is not whole yet surely starts a new block."""
        first = unfinished[:1]
        may_go_on = not first.strip() or (self._in_list and (first in "-*+" or first.isdigit()))
        return self._after_blank and not self._fence and not may_go_on

    def _closes_fence(self, line: str) -> bool:
        bare = line.strip()
        if not self._in_item and _indent(line) > 3:
            return False
        return len(bare) >= len(self._fence) and not bare.strip(self._fence[0])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _text_column(line: str, item: re.Match[str]) -> int:
    """Where the text of an item stands that begins in this line."""
    behind = line[item.end(1) :]
    spaces = _indent(behind)
    return item.end(1) + (spaces if behind.strip() and 1 <= spaces <= 4 else 1)
