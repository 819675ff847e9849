"""The sessions file itself: opened, brought up to date, and its failures in words."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ferrum_mlx.errors import FerrumError, SessionsBusyError

_APPLICATION = 0x4665724D  # in the file's header: whose it is
_PATIENCE = 10.0  # seconds to wait for another process that writes
# Step n brings a file of version n to version n + 1, and stays as it is: there are such files.
_MIGRATIONS = (
    (
        "CREATE TABLE conversations (id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, "
        "system TEXT NOT NULL, leaf INTEGER, updated REAL NOT NULL, deleted REAL)",
        "CREATE TABLE messages (conversation INTEGER NOT NULL, revision INTEGER NOT NULL, "
        "id, parent, role, text, created, thinking, thought_s, model, label, ending, attached, sent, "
        "usage, timings, PRIMARY KEY (conversation, id))",
    ),
)


def data_dir() -> Path:
    """The folder of the user's sessions: $FERRUM_DATA, else the platform's data folder."""
    if named := os.environ.get("FERRUM_DATA"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("ferrum-mlx", appauthor=False)


class Database:
    """One file, for one thread. In SQL, `has(bytes, word)` finds a case-folded word in any text.

    Raises:
        FerrumError: here and in every method: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            self._db = _open(path)
        try:
            self._migrate()
            with self._explained():
                _write_ahead(self._db)  # not before it is known to be ours
        except FerrumError:
            self._db.close()
            raise

    def execute(self, command: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Within `writing` or `reading`."""
        return self._db.execute(command, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; what raises in it leaves the file as it was."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")  # or two readers that both turn writer would fail at once
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                self._roll_back()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """One view of the file, whatever others write meanwhile."""
        with self._explained():
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._roll_back()

    def wait_at_most(self, seconds: float) -> None:
        """For another process that writes."""
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    def close(self) -> None:
        self._db.close()

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # it was not committed, nor ended by an error of the disk
            self._db.execute("ROLLBACK")

    def _migrate(self) -> None:
        with self.writing():
            application, version, tables = (
                self._db.execute(query).fetchone()[0]
                for query in (
                    "PRAGMA application_id",
                    "PRAGMA user_version",
                    "SELECT COUNT(*) FROM sqlite_master",
                )
            )
            if application != _APPLICATION and tables:
                raise FerrumError(
                    f"{self.path} is another program's database",
                    next_step="move it away, or set FERRUM_DATA to another folder",
                )
            if version > len(_MIGRATIONS):
                raise FerrumError(
                    f"the sessions in {self.path} are of version {version}, made by a newer ferrum-mlx",
                    f"this one reads up to version {len(_MIGRATIONS)}",
                    "upgrade, or set FERRUM_DATA to another folder",
                )
            for commands in _MIGRATIONS[version:]:
                for command in commands:
                    self._db.execute(command)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # a fault of ours
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            kind = SessionsBusyError if _code(error) == sqlite3.SQLITE_BUSY else FerrumError
            raise kind(
                f"cannot use the sessions in {self.path}: {_reason(error)}", next_step=_remedy(error)
            ) from error


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # nobody else's to read
    db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)
    try:
        db.text_factory = _text
        db.create_function("has", 2, lambda data, word: word in _text(data).casefold(), deterministic=True)
        db.execute("PRAGMA synchronous = NORMAL")  # what is committed outlives this process, however it ends
    except BaseException:
        db.close()
        raise
    return db


def _text(data: bytes | None) -> str:
    """What a damaged file has may be none."""
    return (data or b"").decode("utf-8", "replace")


def _write_ahead(db: sqlite3.Connection) -> None:
    """Readers and a writer at once. Here SQLite does not wait for another process, so this does."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


def _code(error: sqlite3.DatabaseError | OSError) -> int:
    return int(getattr(error, "sqlite_errorcode", 0) & 0xFF)


def _reason(error: sqlite3.DatabaseError | OSError) -> str:
    return " ".join(str((isinstance(error, OSError) and error.strerror) or error).split())


def _remedy(error: sqlite3.DatabaseError | OSError) -> str:
    code = _code(error)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return "move the file away to begin a new one; sqlite3's .recover may save what is in it"
    if code == sqlite3.SQLITE_BUSY:
        return "another process holds it; end that, or try again"
    if code == sqlite3.SQLITE_FULL:
        return "make room on the disk"
    return "see to its permissions, or set FERRUM_DATA to another folder"
