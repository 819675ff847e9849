"""Where conversations are kept: one SQLite file, safe against a killed process and shared by several."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.database import Database, data_dir
from ferrum_mlx.chat.rows import COLUMNS, clean, from_row, mend, to_row
from ferrum_mlx.errors import UsageError, shown

_KEPT_DELETED = 3600.0  # seconds a deleted session can be restored, unless its store is closed before
_TITLE = 60  # characters of a title that is made of the first prompt
# Without those of which nothing came: their one prompt was taken back.
_LISTED = "c.deleted IS NULL AND EXISTS (SELECT 1 FROM messages m WHERE m.conversation = c.id)"
_AROUND = 30  # characters of a snippet before and behind the hit


HeadField = Literal["title", "system", "leaf"]


class _ChangedElsewhere(Exception):
    """Another process has changed what this one was about to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session in a list.

    Attributes:
        updated: seconds since the epoch.
        model: who answered last; "" if nobody did.
        snippet: the text around the first word searched for; "" where only the title has it.
    """

    id: int
    title: str
    updated: float
    messages: int
    model: str
    snippet: str = ""


class Store:
    """Conversations in a file. For one thread; each call is one transaction, committed when it returns.

    Every message has a revision. One that another process has changed meanwhile is never overwritten:
    the conversation in hand goes on under a new id, and `on_note` is told.

    Args:
        path: the file; made, with its folder, if it is not there. None is the user's own.
        on_note: told what a user must know.

    Raises:
        FerrumError: here and in every method: the file cannot be read or written.
    """

    def __init__(self, path: Path | None = None, on_note: Callable[[str], None] | None = None) -> None:
        self.on_note = on_note
        self._revisions: dict[tuple[int, int], int] = {}  # as last seen, by conversation and message
        self._deleted: set[int] = set()
        self._db = Database(path or data_dir() / "sessions.db")
        self._purge("deleted < ?", (time.time() - _KEPT_DELETED,))

    @property
    def path(self) -> Path:
        return self._db.path

    def wait_at_most(self, seconds: float) -> None:
        """For another process that writes; from then on it is a SessionsBusyError. At first it is 10 s."""
        self._db.wait_at_most(seconds)

    def keep(self, conversation: Conversation) -> None:
        """Write the conversation whole, under a new id."""
        if not conversation.title:
            conversation.title = _beginning(conversation)
        with self._db.writing():
            session = self._insert(conversation)
        self._kept(conversation, session)

    def save(self, conversation: Conversation, *messages: Message) -> None:
        """Write messages as they stand now, and the leaf: all of it or nothing.

        The conversation's first ones give it an id.
        """
        session = conversation.id
        if session is None:
            self.keep(conversation)
            return
        try:
            with self._db.writing():
                for message in messages:
                    self._write(session, message)
                # Who writes to a session wants it, also if it was deleted meanwhile.
                self._db.execute(
                    "UPDATE conversations SET updated = ?, deleted = NULL, leaf = ? WHERE id = ?",
                    (time.time(), conversation.leaf, session),
                )
        except _ChangedElsewhere:
            self._go_on_elsewhere(conversation, session)
        else:
            for key in ((session, message.id) for message in messages):
                self._revisions[key] = self._revisions.get(key, 0) + 1

    def save_head(self, conversation: Conversation, *fields: HeadField) -> None:
        """Write these alone, as another process may have changed the others; nothing without an id."""
        values = [getattr(conversation, name) for name in fields]
        changes = ", ".join(f"{name} = ?" for name in fields)
        with self._db.writing():
            self._db.execute(
                f"UPDATE conversations SET {changes} WHERE id = ?",
                (*(clean(value) if isinstance(value, str) else value for value in values), conversation.id),
            )

    def remove(self, conversation: Conversation, message_id: int) -> None:
        """Take one message out; it may never have been saved."""
        with self._db.writing():
            self._db.execute(
                "DELETE FROM messages WHERE conversation = ? AND id = ?", (conversation.id, message_id)
            )
        if conversation.id is not None:
            self._revisions.pop((conversation.id, message_id), None)

    def load(self, session: int) -> Conversation:
        """The conversation of that id, without answers of which nothing came: who made them was killed.

        Raises:
            UsageError: there is none.
        """
        with self._db.reading():
            title, system, leaf = self._head(session)
            rows = self._db.execute(
                f"SELECT revision, {', '.join(COLUMNS)} FROM messages WHERE conversation = ? ORDER BY id",
                (session,),
            ).fetchall()
        messages, damaged = {}, 0
        for revision, *row in rows:
            message, whole = from_row(row)
            damaged += not whole
            if message is not None:
                messages[message.id] = message
                self._revisions[session, message.id] = revision
        damaged += mend(messages)
        if damaged and self.on_note is not None:
            self.on_note(f"session {session} is damaged in {damaged} places; what could be read is here")
        if leaf not in messages:
            leaf = max(messages, default=None)
        conversation = Conversation(id=session, title=title, system=system, messages=messages, leaf=leaf)
        conversation.drop_what_came_to_nothing()
        # Its writer may have been killed before it had the time to say where it went on.
        if conversation.leaf is not None:
            conversation.leaf = conversation.end_below(conversation.leaf)
        return conversation

    def latest(self, beside: int | None = None) -> int | None:
        """The id of the session that was written to last, one excepted."""
        with self._db.reading():
            row = self._db.execute(
                f"SELECT c.id FROM conversations c WHERE {_LISTED} AND c.id IS NOT ? "
                "ORDER BY c.updated DESC, c.id DESC LIMIT 1",
                (beside,),
            ).fetchone()
        return row[0] if row else None

    def list(self, words: str = "") -> list[SessionRow]:
        """Sessions, newest first; with words, those whose title or texts have every one of them.

        Upper and lower case count as one, in every alphabet; a word may be a part of a longer one.
        """
        wanted = words.casefold().split()
        has = (
            " AND (has(CAST(c.title AS BLOB), ?) OR EXISTS (SELECT 1 FROM messages m "
            "WHERE m.conversation = c.id AND has(CAST(m.text AS BLOB), ?)))"
        )
        with self._db.reading():
            rows = self._db.execute(
                "SELECT c.id, c.title, c.updated, "
                "(SELECT COUNT(*) FROM messages m WHERE m.conversation = c.id), "
                "(SELECT m.model FROM messages m WHERE m.conversation = c.id AND m.model != '' "
                "ORDER BY m.id DESC LIMIT 1) "
                f"FROM conversations c WHERE {_LISTED}{has * len(wanted)} "
                "ORDER BY c.updated DESC, c.id DESC",
                tuple(word for word in wanted for _ in range(2)),
            ).fetchall()
            return [
                SessionRow(
                    id=session,
                    title=title,
                    updated=updated,
                    messages=count,
                    model=model or "",
                    snippet=self._snippet(session, wanted[0]) if wanted else "",
                )
                for session, title, updated, count, model in rows
            ]

    def rename(self, session: int, title: str) -> None:
        with self._db.writing():
            self._head(session)
            self._db.execute("UPDATE conversations SET title = ? WHERE id = ?", (clean(title), session))

    def delete(self, session: int) -> None:
        """Take a session off the lists; it is gone for good once the store is closed."""
        with self._db.writing():
            self._head(session)
            self._db.execute("UPDATE conversations SET deleted = ? WHERE id = ?", (time.time(), session))
        self._deleted.add(session)

    def restore(self, session: int) -> None:
        """Undo `delete`."""
        with self._db.writing():
            self._head(session, deleted=True)
            self._db.execute("UPDATE conversations SET deleted = NULL WHERE id = ?", (session,))
        self._deleted.discard(session)

    def close(self) -> None:
        """Idempotent."""
        deleted, self._deleted = tuple(self._deleted), set()
        try:
            for session in deleted:
                self._purge("deleted IS NOT NULL AND id = ?", (session,))
        finally:
            self._db.close()

    def _go_on_elsewhere(self, conversation: Conversation, session: int) -> None:
        with self._db.writing():
            other = self._insert(conversation)
        self._kept(conversation, other)
        if self.on_note is not None:
            self.on_note(f"session {session} was changed by another chat; this one goes on as {other}")

    def _insert(self, conversation: Conversation) -> int:
        cursor = self._db.execute(
            "INSERT INTO conversations (title, system, leaf, updated) VALUES (?, ?, ?, ?)",
            (clean(conversation.title), clean(conversation.system), conversation.leaf, time.time()),
        )
        assert cursor.lastrowid is not None
        for message in conversation.messages.values():
            self._write(cursor.lastrowid, message)
        return cursor.lastrowid

    def _kept(self, conversation: Conversation, session: int) -> None:
        conversation.id = session
        self._revisions |= {(session, message_id): 1 for message_id in conversation.messages}

    def _write(self, session: int, message: Message) -> None:
        """Raises _ChangedElsewhere where the message is not as this store has last seen it."""
        seen = self._revisions.get((session, message.id), 0)
        columns = ("conversation", "revision", *COLUMNS)
        row = (session, seen + 1, *to_row(message))
        if seen:
            changes = ", ".join(f"{name} = ?" for name in columns)
            command = f"UPDATE messages SET {changes} WHERE conversation = ? AND id = ? AND revision = ?"
            cursor = self._db.execute(command, (*row, session, message.id, seen))
        else:
            marks = ", ".join("?" for _ in columns)
            # A session that was purged meanwhile gets no messages.
            command = (
                f"INSERT OR IGNORE INTO messages ({', '.join(columns)}) SELECT {marks} "
                "WHERE EXISTS (SELECT 1 FROM conversations WHERE id = ?)"
            )
            cursor = self._db.execute(command, (*row, session))
        if cursor.rowcount == 0:
            raise _ChangedElsewhere

    def _head(self, session: int, deleted: bool = False) -> tuple[str, str, int | None]:
        row: tuple[str, str, int | None] | None = self._db.execute(
            "SELECT title, system, leaf FROM conversations WHERE id = ? AND (deleted IS NOT NULL) = ?",
            (session, deleted),
        ).fetchone()
        if row is None:
            raise UsageError(f"session {shown(session)} is not there", next_step="see /sessions")
        return row

    def _snippet(self, session: int, word: str) -> str:
        row = self._db.execute(
            "SELECT text FROM messages WHERE conversation = ? AND has(CAST(text AS BLOB), ?) "
            "ORDER BY id LIMIT 1",
            (session, word),
        ).fetchone()
        if row is None:
            return ""
        at = row[0].casefold().find(word)  # near enough where folding changes the length
        start, end = max(at - _AROUND, 0), at + len(word) + _AROUND
        middle = " ".join(row[0][start:end].split())
        return f"{'…' * (start > 0)}{middle}{'…' * (end < len(row[0]))}"

    def _purge(self, which: str, values: tuple[float, ...]) -> None:
        chosen = f"SELECT id FROM conversations WHERE {which}"
        with self._db.writing():
            self._db.execute(f"DELETE FROM messages WHERE conversation IN ({chosen})", values)
            self._db.execute(f"DELETE FROM conversations WHERE {which}", values)


def _beginning(conversation: Conversation) -> str:
    text = next((message.text for message in conversation.messages.values()), "")
    line = " ".join(text[: 10 * _TITLE].split())
    return line if len(line) <= _TITLE else line[: _TITLE - 1].rstrip() + "…"
