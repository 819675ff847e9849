"""The file that keeps the conversations of a screen, and what is done while it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from textual.app import App

from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError, SessionsBusyError

# Our own transactions take a millisecond, that of a whole conversation of 10,000 messages 0.3 s. Who holds
# the file for longer is another program.
_PATIENCE = 0.2  # seconds that the screen stands still for it
_AGAIN = 2.0  # seconds until what could not be written is tried again
_AT_THE_END = 3.0  # seconds of patience when there is no later


class Keeping:
    """Gives books that tell the user what goes wrong, and tries again.

    Attributes:
        store: None keeps nothing, from the beginning or since it has failed.
    """

    def __init__(self, app: App[Any], store: Store | None, note: Callable[[str], None]) -> None:
        self.store = self._opened = store
        self._app, self._note = app, note
        self._waiting: list[Book] = []
        if store is not None:
            store.on_note = note
            store.wait_at_most(_PATIENCE)

    def book(self, conversation: Conversation) -> Book:
        book = Book(conversation, self.store, lambda error: self._failed(book, error))
        return book

    def close(self) -> None:
        if self._opened is None:
            return
        self._opened.wait_at_most(_AT_THE_END)
        for book in self._waiting:
            book.retry()
        with contextlib.suppress(FerrumError):  # what was deleted is purged another time
            self._opened.close()

    def _failed(self, book: Book, error: FerrumError) -> None:
        if not isinstance(error, SessionsBusyError):
            self.store = None
            self._note(f"conversations are no longer kept: {error}")
            return
        self._note(f"this conversation is not kept for now: {error}")
        if not self._waiting:
            self._app.set_timer(_AGAIN, self._again)
        if book not in self._waiting:
            self._waiting.append(book)

    def _again(self) -> None:
        for book in self._waiting:
            book.retry()
        self._waiting = [book for book in self._waiting if book.waiting]
        if self._waiting:
            self._app.set_timer(_AGAIN, self._again)
        elif self.store is not None:
            self._note("all is kept again")
