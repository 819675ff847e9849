"""Ctrl+S: past sessions, to find, resume, rename, delete and export."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.export import write
from ferrum_mlx.chat.store import SessionRow, Store
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.sanitize import sanitize

from ..key_row import KeyRow
from .finder import Cell, SearchBox, table

_DEBOUNCE = 0.15  # seconds after the last letter until the store is asked
_DIM = "dim"
_TITLE = 1  # column
_DROP = (4, 3, 2)
_ON_A_ROW = ("rename", "delete", "export")  # actions
_EXPORT_HINT = "Enter: named after its title, .md; or a name that ends in .md or .json"


class SessionsScreen(ModalScreen[int | None]):
    """Dismissed with the id of the session to resume, or None.

    Args:
        store: asked on the event loop's thread, to which it belongs.
        current: the conversation in hand, which a rename here renames, too.
        words: to search for at first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Close", id="sessions.close"),
        Binding("slash", "search", "Search", id="sessions.search"),
        Binding("r", "rename", "Rename", id="sessions.rename"),
        Binding("d", "delete", "Delete", id="sessions.delete"),
        Binding("u", "undo", "Undo delete", id="sessions.undo"),
        Binding("x", "export", "Export", id="sessions.export"),
    ]

    def __init__(self, store: Store, current: Conversation | None = None, words: str = "") -> None:
        super().__init__()
        self._words = words
        self._store, self._in_hand = store, current
        self._current = current.id if current is not None else None
        self._rows: list[SessionRow] = []
        self._deleted: list[SessionRow] = []
        self._asked = ""  # "rename" or "export", while the line below the list asks for a name
        self._pause: Timer | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="sessions", classes="picker") as box:
            box.border_title = "sessions"
            yield SearchBox("search titles and texts", self._words)
            yield OptionList(compact=True, markup=False)
            with Horizontal(classes="inline"):
                yield Static(classes="asked", markup=False)
                yield Input(id="name", compact=True)
            yield Static(classes="note", markup=False)
        yield KeyRow(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._read()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "undo":
            return bool(self._deleted) and isinstance(self.focused, OptionList)
        return action not in _ON_A_ROW or (bool(self._rows) and isinstance(self.focused, OptionList))

    def on_descendant_focus(self) -> None:
        self.refresh_bindings()

    # The list

    def _read(self, highlight: int | None = None) -> None:
        """Ask the store; the row that was highlighted stays so, if it is still there."""
        try:
            self._rows = self._store.list(self.query_one(SearchBox).value)
        except FerrumError as error:
            self._say(str(error), "error")
            return
        self._fill(highlight)
        self.refresh_bindings()
        if self._rows:
            self._say(f"{len(self._rows):,} session{'s' * (len(self._rows) != 1)}")
        elif self.query_one(SearchBox).value.strip():
            self._say("no session has all these words")
        else:
            self._say("There are no sessions yet: what you ask is kept here from its first prompt on.")

    def _fill(self, highlight: int | None = None) -> None:
        rows = self.query_one(OptionList)
        row = self._highlighted()
        wanted = highlight if highlight is not None else row.id if row else self._current
        width = max(rows.scrollable_content_region.width, 10)
        lines = table([self._cells(row) for row in self._rows], width, elastic=_TITLE, drop=_DROP)
        rows.set_options(Option(line, id=str(row.id)) for row, line in zip(self._rows, lines, strict=True))
        ids = [row.id for row in self._rows]
        rows.highlighted = ids.index(wanted) if wanted in ids else 0 if ids else None

    def _cells(self, row: SessionRow) -> list[Cell]:
        return [
            ("●" if row.id == self._current else " ", "bold $text-accent"),
            (row.title or "untitled", "bold"),
            (row.snippet, "$text-warning"),
            (row.model, _DIM),
            (f"{row.messages:,} msg", _DIM),
            (_when(row.updated), _DIM),
        ]

    def _highlighted(self) -> SessionRow | None:
        option = self.query_one(OptionList).highlighted_option
        return next((row for row in self._rows if option is not None and str(row.id) == option.id), None)

    @on(Input.Changed, "SearchBox")
    def _typed(self) -> None:
        if self._pause is not None:
            self._pause.stop()
        self._pause = self.set_timer(_DEBOUNCE, self._read)

    @on(Input.Submitted, "SearchBox")
    def _enter_in_the_box(self) -> None:
        if self._pause is not None:
            self._pause.stop()
        self._read()
        if row := self._highlighted():
            self.dismiss(row.id)

    @on(OptionList.OptionSelected)
    def _enter_on_a_row(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(int(event.option.id or 0))

    # What is done to a session

    def action_delete(self) -> None:
        if (row := self._highlighted()) is None:
            return
        if row.id == self._current:
            self._say("this is the session in hand; begin another before you delete it", "error")
            return
        if self._done(lambda: self._store.delete(row.id)):
            self._deleted.append(row)
            at = self._rows.index(row)
            below = [*self._rows[at + 1 : at + 2], *self._rows[:at][-1:]]
            self._read(below[0].id if below else None)
            self._say(f"{_title(row)} is deleted; u brings it back until the chat ends")

    def action_undo(self) -> None:
        row = self._deleted.pop()
        if self._done(lambda: self._store.restore(row.id)):
            self._read(row.id)
            self._say(f"{_title(row)} is back")

    def action_rename(self) -> None:
        if row := self._highlighted():
            self._ask("rename", "title", row.title)

    def action_export(self) -> None:
        if self._highlighted():
            self._ask("export", "file", "", _EXPORT_HINT)

    def _ask(self, what: str, label: str, value: str, hint: str = "") -> None:
        self._asked = what
        self.query_one(".asked", Static).update(Content(label))
        self.query_one(".inline").display = True
        box = self.query_one("#name", Input)
        box.placeholder, box.value = hint, value
        box.focus()

    @on(Input.Submitted, "#name")
    def _named(self, event: Input.Submitted) -> None:
        row, name = self._highlighted(), event.value.strip()
        if row is None:
            return
        if self._asked == "rename":
            if not name:
                self._say("a title has at least one letter; Esc leaves it as it was", "error")
            elif self._done(lambda: self._store.rename(row.id, name)):
                if self._in_hand is not None and row.id == self._current:
                    self._in_hand.title = name
                self._put_away()
                self._read(row.id)
        elif self._done(lambda: self._export(row, name)):
            self._put_away()

    def _export(self, row: SessionRow, name: str) -> None:
        conversation = self._in_hand
        if conversation is None or row.id != self._current:  # to load the one in hand would undo its checks
            conversation = self._store.load(row.id)
        file = write(conversation, conversation.leaf, name)
        self._say(f"written: {file.absolute()}")

    def _put_away(self) -> None:
        self._asked = ""
        self.query_one(".inline").display = False
        self.query_one(OptionList).focus()

    def _done(self, what: Callable[[], object]) -> bool:
        """Do it; an error is shown, and False."""
        try:
            what()
        except FerrumError as error:
            self._say(str(error), "error")
            return False
        return True

    def action_search(self) -> None:
        self.query_one(SearchBox).focus()

    def action_back(self) -> None:
        if self._asked:
            self._put_away()
        else:
            self.dismiss(None)

    def _say(self, what: str, kind: str = "") -> None:
        note = self.query_one(".note", Static)
        note.update(Content(sanitize(what)))
        note.set_class(kind == "error", "-error")


def _title(row: SessionRow) -> str:
    return f"“{row.title}”" if row.title else "the session"


def _when(at: float) -> str:
    """The time of today, else the date."""
    then, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d", then)
