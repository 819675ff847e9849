"""Files that cannot be the sessions file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError


def damaged(path: Path) -> None:
    path.write_bytes(b"no database " * 1000)


def newer(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE songs (name)")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (damaged, "move the file away"),
        (newer, "version 99"),
        (foreign, "another program's database"),
        (Path.mkdir, "FERRUM_DATA"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(make, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(FerrumError, match=said) as raised:
        Store(path)
    assert str(path) in str(raised.value)
    assert before == (path.read_bytes() if path.is_file() else b"")
