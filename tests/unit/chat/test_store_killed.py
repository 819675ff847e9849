"""A chat that is killed with SIGKILL at a random moment: every message it had committed is there."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from ferrum_mlx.chat.store import Store

# Says "session message length" on stdout once that much of a message is committed, in turns as of a chat.
WRITER = """
import sys
from pathlib import Path
from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
store = Store(Path(sys.argv[1]))
while True:
    conversation = Conversation()
    book = Book(conversation, store, print)
    for _ in range(4):
        asked = conversation.add("user", "word " * 200, parent=conversation.leaf)
        answer = conversation.add("assistant", parent=asked.id)
        book.stand_at(answer.id, asked, answer)
        print(conversation.id, asked.id, len(asked.text), flush=True)
        for _ in range(6):
            answer.text += "word " * 200
            book.keep(answer)
            print(conversation.id, answer.id, len(answer.text), flush=True)
"""


def test_every_committed_message_survives(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    chance = random.Random(3)
    committed: dict[tuple[int, int], int] = {}
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randint(1, 200)):
                note(writer.stdout.readline(), committed)
            writer.kill()  # somewhere in what it does next
            for line in writer.stdout:
                note(line, committed)
        with closing(Store(path)) as store:
            check(store, committed)
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(committed) > 50


def note(line: str, committed: dict[tuple[int, int], int]) -> None:
    if line.endswith("\n"):  # else the kill cut it
        session, message, length = map(int, line.split())
        committed[session, message] = length


def check(store: Store, committed: dict[tuple[int, int], int]) -> None:
    assert {row.id for row in store.list()} >= {session for session, _ in committed}
    for session in {session for session, _ in committed}:
        conversation = store.load(session)
        path = conversation.path(conversation.leaf)
        assert path == list(conversation.messages.values())  # there is no fork, so all of it is shown
        # The last prompt may be one of whose answer nothing was committed.
        assert [message.role for message in path] == (["user", "assistant"] * len(path))[: len(path)]
        for (owner, message), length in committed.items():
            if owner == session:
                assert len(conversation.messages[message].text) >= length
