"""Blocks of an answer as widgets: many paragraphs in one, as each widget more costs at every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.geometry import Region, Size
from textual.highlight import (
    ANSIDarkHighlightTheme,
    ANSILightHighlightTheme,
    HighlightTheme,
    highlight,
)
from textual.message import Message
from textual.selection import Selection
from textual.widget import Widget
from textual.widgets import Static

from .markup import Fence, Paragraph
from .once import LaidOutOnce
from .table import Table

_HIGHLIGHTED = 20_000  # characters; longer code stays plain: 400 lines take 60 ms once, in one go
_TAB = 4  # cells; a highlighter counts characters, so that tabs are spaces before it sees them
_ROOM = 8  # cells beside a prefix; where fewer are left, text goes without its prefix


@dataclass(frozen=True, slots=True)
class _Row:
    """A line on screen. `joint` is what stood before it in the text, where wrapping has cut."""

    line: Content
    indent: int  # characters of the prefix
    joint: str


class MarkdownBlock(LaidOutOnce, Widget):
    """Paragraphs, wrapped with hanging indents. What is copied from it has no line breaks of wrapping."""

    DEFAULT_CSS = "MarkdownBlock { height: auto; width: 1fr; text-wrap: nowrap; }"

    def __init__(self, paragraphs: Sequence[Paragraph] = ()) -> None:
        super().__init__()
        self._paragraphs = list(paragraphs)
        self._rows: list[_Row] = []
        self._width = 0

    @property
    def paragraphs(self) -> Sequence[Paragraph]:
        return self._paragraphs

    def put(self, paragraphs: Sequence[Paragraph]) -> None:
        """Show these instead; where they take as many rows, only those that differ are drawn again."""
        before, known = self._rows, self._width
        self._paragraphs, self._width = list(paragraphs), 0
        rows = self._rows_at(self.content_size.width)
        if self._width != known or len(rows) != len(before):
            self.refresh(layout=True)
        elif changed := [y for y, row in enumerate(rows) if not row.line.is_same(before[y].line)]:
            self.refresh(Region(0, changed[0], known, changed[-1] + 1 - changed[0]))

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows_at(width))

    def render(self) -> Content:
        return Content("\n").join([row.line for row in self._rows_at(self.content_size.width)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        rows = self._rows
        first, start = (selection.start.y, selection.start.x) if selection.start else (0, 0)
        last, end = (selection.end.y, selection.end.x) if selection.end else (len(rows) - 1, None)
        text = ""
        for y in range(max(first, 0), min(last, len(rows) - 1) + 1):
            row = rows[y]
            left = start if y == first else 0
            if y > first:
                text += row.joint
                left = row.indent if row.joint != "\n" else 0
            text += row.line.plain[left : end if y == last else None]
        return text, "\n"

    def _rows_at(self, width: int) -> list[_Row]:
        if width != self._width and width > 0:
            self._width = width
            self._rows = [row for paragraph in self._paragraphs for row in _rows(paragraph, width)]
        return self._rows


def _rows(paragraph: Paragraph, width: int) -> Iterator[_Row]:
    first, rest, content = paragraph.first, paragraph.rest, paragraph.content
    room = width - max(first.cell_length, rest.cell_length)
    if room < _ROOM:
        first, rest, room = Content(""), Content(""), width
    if isinstance(content, Table):
        for number, line in enumerate(content.lines(room)):
            yield _Row((rest if number else first) + line, 0, "\n")
        return
    content = content.expand_tabs(_TAB)
    plain, at = content.plain, 0
    for number, line in enumerate(content.wrap(room)):
        start = max(plain.find(line.plain, at) if line.plain else plain.find("\n", at) + bool(number), at)
        yield _Row(
            (rest if number else first) + line,
            len(rest.plain) if number else 0,
            plain[at:start] if number else "\n",
        )
        at = start + len(line.plain)


class CodeBlock(Static, can_focus=True):
    """Code with its language; `y`, Enter, or a click on its border copies it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y,enter", "copy", "Copy code", id="code.copy")]

    class Copy(Message):
        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self, fence: Fence) -> None:
        super().__init__(markup=False)
        self.code, self._language = fence.code, fence.language
        self._styles: type[HighlightTheme] | None = None
        self.set_class(fence.depth > 0, "-in-list")
        self.border_title = Content(fence.language)
        self.border_subtitle = "y copy"

    def on_mount(self) -> None:
        self._show()

    def notify_style_update(self) -> None:
        """A theme of another kind has other styles for code."""
        super().notify_style_update()
        self._show()

    def _show(self) -> None:
        styles = HighlightTheme
        if self.app.native_ansi_color:
            dark = self.app.current_theme.dark
            styles = ANSIDarkHighlightTheme if dark else ANSILightHighlightTheme
        if styles is self._styles:
            return
        self._styles = styles
        code = self.code.rstrip("\n").expandtabs(_TAB)
        if len(code) > _HIGHLIGHTED:
            self.update(Content(code))
        else:
            self.update(highlight(code, language=self._language or "text", theme=styles))

    def focus_on_click(self) -> bool:
        return False  # as of a message

    def action_copy(self) -> None:
        self.post_message(self.Copy(self.code))

    def on_click(self, event: Click) -> None:
        if event.y in (0, self.outer_size.height - 1):
            self.action_copy()
