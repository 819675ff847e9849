"""The sessions file: what is kept, found, deleted; two chats at once."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Conversation, Ending
from ferrum_mlx.chat.rows import COLUMNS
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError, SessionsBusyError, UsageError
from ferrum_mlx.metrics import Timings, Usage


@pytest.fixture
def store(tmp_path: Path):
    with closing(Store(tmp_path / "data" / "s.db")) as opened:
        yield opened


def talked(store: Store, *texts: str, title: str = "") -> Conversation:
    """Prompts and answers in turn, each saved as a chat does."""
    conversation = Conversation(title=title, system="be kind")
    for index, text in enumerate(texts):
        message = conversation.add(("user", "assistant")[index % 2], text, parent=conversation.leaf)
        message.model = "tiny" if index % 2 else ""
        conversation.leaf = message.id
        store.save(conversation, message)
    return conversation


def test_a_conversation_comes_back_as_it_was(store: Store) -> None:
    conversation = talked(store, "hi 😀\0\x1b[1m", "hello", "more")
    answer = conversation.add("assistant", parent=1)
    answer.text, answer.thinking, answer.thought_s, answer.label = "beside", "hm", 1.5, "temperature=0"
    answer.attached, answer.sent, answer.ending = ("a.txt", "b c.txt"), "long", "abort"
    answer.usage, answer.timings = Usage(3, 4, 2), Timings(0.5, 10.0, 20.0)
    store.save(conversation, answer)
    conversation.title, conversation.leaf = "renamed", answer.id
    store.save_head(conversation, "title", "leaf")
    assert conversation.id is not None
    with closing(Store(store.path)) as other:
        assert other.load(conversation.id) == conversation


def test_a_growing_answer_is_one_row(store: Store) -> None:
    conversation = talked(store, "count")
    answer = conversation.add("assistant", parent=1)
    for text in ("1", "1 2", "1 2 3"):
        answer.text = text
        store.save(conversation, answer)
    assert [m.text for m in store.load(conversation.id).messages.values()] == ["count", "1 2 3"]


def test_a_turn_is_kept_whole_or_not_at_all(store: Store) -> None:
    conversation = talked(store, "hi", "hello")
    before = store.load(conversation.id)
    asked = conversation.add("user", "more", parent=2)
    answer = conversation.add("assistant", "so", parent=asked.id)
    conversation.leaf, answer.attached = answer.id, {1}  # no JSON
    with pytest.raises(TypeError):
        store.save(conversation, asked, answer)
    assert store.load(conversation.id) == before
    answer.attached = ()
    store.save(conversation, asked, answer)
    assert store.load(conversation.id) == conversation


@pytest.mark.parametrize(("ending", "text", "thinking", "stays"), [
    ("", "", "", False),
    ("abort", "", "", False),
    ("broken", "", "", False),
    ("stop", "", "", True),  # the model had nothing to say
    ("length", "", "", True),
    ("abort", "", "hm", True),
    ("", "h", "", True),
])  # fmt: skip
def test_an_answer_of_which_nothing_came_leaves_its_prompt(
    store: Store, ending: Ending, text: str, thinking: str, stays: bool
) -> None:
    conversation = talked(store, "hi", "hello", "more")
    answer = conversation.add("assistant", text, parent=3)
    answer.ending, answer.thinking, conversation.leaf = ending, thinking, answer.id
    store.save(conversation, answer)
    loaded = store.load(conversation.id)
    assert loaded.leaf == (4 if stays else 3)
    assert [message.text for message in loaded.path(loaded.leaf)] == ["hi", "hello", "more", text][
        : loaded.leaf
    ]
    loaded.leaf = loaded.add("user", "again", parent=loaded.last_answer(loaded.leaf)).id
    store.save(loaded, loaded.messages[loaded.leaf])  # in its row, where it is gone
    assert store.load(conversation.id) == loaded
    assert loaded.id == conversation.id
    assert [said["content"] for said in loaded.for_model(loaded.leaf)] == [
        "be kind", "hi", "hello", *(["more", text] if stays else []), "again",
    ]  # fmt: skip


def test_a_second_answer_of_which_nothing_came_leaves_the_first(store: Store) -> None:
    conversation = talked(store, "hi", "hello", "more", "yes")
    conversation.leaf = conversation.add("assistant", parent=1).id
    store.save(conversation, conversation.messages[conversation.leaf])
    loaded = store.load(conversation.id)
    assert [message.text for message in loaded.path(loaded.leaf)] == ["hi", "hello", "more", "yes"]


def test_what_was_said_behind_an_empty_answer_stays_and_the_model_is_given_turns(store: Store) -> None:
    """As an earlier version has kept it."""
    loaded = store.load(talked(store, "hi", "", "more", "yes").id)
    assert [message.text for message in loaded.path(loaded.leaf)] == ["hi", "", "more", "yes"]
    assert [(said["role"], said["content"]) for said in loaded.for_model(loaded.leaf)] == [
        ("system", "be kind"),
        ("user", "more"),
        ("assistant", "yes"),
    ]


def test_the_title_is_the_first_prompts_beginning(store: Store) -> None:
    assert talked(store, "two\n words").title == "two words"
    assert talked(store, "x" * 500).title == "x" * 59 + "…"
    assert talked(store, "hi", title="mine").title == "mine"


def test_newest_first_and_latest(store: Store) -> None:
    assert (store.latest(), store.list()) == (None, [])
    first, second = talked(store, "one", "1"), talked(store, "two")
    assert store.latest() == second.id
    store.save(first, first.messages[1])
    assert store.latest() == first.id
    assert [(row.id, row.messages, row.model) for row in store.list()] == [
        (first.id, 2, "tiny"),
        (second.id, 1, ""),
    ]


def test_every_word_must_be_somewhere(store: Store) -> None:
    conversation = talked(store, "Über den Wolken 100%", "a _long_ answer about " + "clouds " * 40)
    talked(store, "something else")
    for words in ("über", "ÜBER cloud", "wolken", "100%", "_long_"):
        assert [row.id for row in store.list(words)] == [conversation.id], words
    assert store.list("über else") == []
    assert store.list("1%0") == []
    assert store.list("_LONG_")[0].snippet == "a _long_ answer about clouds clouds cl…"
    store.rename(conversation.id, "meteorology")
    assert [(row.title, row.snippet) for row in store.list("meteor")] == [("meteorology", "")]


def test_a_deleted_session_can_be_restored_until_the_store_closes(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = Store(path)
    kept, gone = talked(store, "kept"), talked(store, "gone")
    store.delete(kept.id)
    store.delete(gone.id)
    assert store.list() == []
    with pytest.raises(UsageError, match="is not there"):
        store.load(kept.id)
    store.restore(kept.id)
    store.close()
    store.close()
    with closing(Store(path)) as store:
        assert [row.id for row in store.list()] == [kept.id]
        with pytest.raises(UsageError, match="is not there"):
            store.restore(gone.id)
        assert talked(store, "new").id not in (kept.id, gone.id)


def test_what_a_killed_process_deleted_is_purged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    store = Store(path)
    gone = talked(store, "gone").id
    store.delete(gone)
    with closing(Store(path)) as other:
        other.restore(gone)
        other.delete(gone)
        other._deleted.clear()  # as if it had been killed
    monkeypatch.setattr("ferrum_mlx.chat.store._KEPT_DELETED", -1.0)
    with closing(Store(path)) as other, pytest.raises(UsageError):
        other.restore(gone)
    store.close()


def test_a_removed_message_is_gone_and_its_number_free(store: Store) -> None:
    conversation = talked(store, "hi", "never mind")
    conversation.leaf = 1
    conversation.remove(2)
    store.remove(conversation, 2)
    store.save(conversation, conversation.add("assistant", "anew", parent=1))
    assert [m.text for m in store.load(conversation.id).messages.values()] == ["hi", "anew"]
    empty = talked(store, "taken back")
    empty.remove(1)
    store.remove(empty, 1)
    assert [row.id for row in store.list()] == [conversation.id]


@pytest.mark.parametrize("change", ["new message", "same answer"])
def test_two_chats_in_one_session_lose_nothing(store: Store, change: str) -> None:
    notes: list[str] = []
    mine = talked(store, "hi", "hello")
    with closing(Store(store.path, notes.append)) as other:
        theirs = other.load(mine.id)
        if change == "new message":
            store.save(mine, mine.add("user", "my next", parent=2))
            other.save(theirs, theirs.add("user", "their next", parent=2))
        else:
            mine.messages[2].text, theirs.messages[2].text = "hello, my next", "hello, their next"
            store.save(mine, mine.messages[2])
            other.save(theirs, theirs.messages[2])
        other.save(theirs, theirs.messages[2])  # goes on there
    assert theirs.id != mine.id
    assert [f"goes on as {theirs.id}" in note for note in notes] == [True]
    assert "my next" in store.load(mine.id).messages[max(mine.messages)].text
    assert "their next" in store.load(theirs.id).messages[max(theirs.messages)].text


def test_writing_to_a_session_that_was_deleted_meanwhile_keeps_it(store: Store) -> None:
    mine = talked(store, "hi", "hello")
    with closing(Store(store.path)) as other:
        other.delete(mine.id)
        mine.leaf = mine.add("user", "still here", parent=2).id
        store.save(mine, mine.messages[3])
    assert store.load(mine.id) == mine  # not purged: it is wanted again
    with closing(Store(store.path)) as other:
        other.delete(mine.id)
    store.save(mine, mine.add("assistant", "and here", parent=3))
    assert len(store.load(mine.id).messages) == 4


def test_processes_that_begin_and_write_at_once_wait_for_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from ferrum_mlx.chat.conversation import Conversation; from ferrum_mlx.chat.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for n in range(40):\n"
        "    c = Conversation(); store.save(c, c.add('user', f'{sys.argv[2]} {n}', parent=None))\n"
    )
    path = tmp_path / "new" / "s.db"
    processes = [subprocess.Popen([sys.executable, "-c", code, path, str(name)]) for name in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    with closing(Store(path)) as store:
        assert {row.title for row in store.list()} == {f"{p} {n}" for p in range(3) for n in range(40)}


def test_half_a_character_does_no_harm(store: Store) -> None:
    conversation = talked(store, "a\ud83dz")
    assert store.load(conversation.id).messages[1].text == "a?z"


def test_nobody_else_may_read_it(store: Store) -> None:
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_the_folder_is_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRUM_DATA", str(tmp_path / "named"))
    with closing(Store()) as store:
        assert store.path == tmp_path / "named" / "sessions.db"


@pytest.mark.parametrize(
    ("damage", "read", "places"),
    [
        ("usage = '{\"prompt_tokens\": '", "hi hello more yes", 1),
        ('timings = \'{"ttft_s": "x", "prefill_tps": 1, "decode_tps": 1}\'', "hi hello more yes", 1),
        ("attached = 'null'", "hi hello more yes", 1),
        ("attached = x'ff00'", "hi hello more yes", 1),
        ("ending = 'exploded'", "hi hello more yes", 1),
        ("text = NULL", "hi  more yes", 1),
        ("text = CAST(x'68ff69' AS TEXT)", "hi h\ufffdi more yes", 0),
        ("parent = 99", "hi hello more yes", 1),
        ("parent = 2", "hi hello more yes", 1),
        ("parent = 4", "hi hello more yes", 1),
        ("parent = 'one'", "hi hello more yes", 2),
        ("role = 'system'", "more yes", 2),  # of two prompts in a row, the second is a branch
        ("id = 'two'", "more yes", 2),
    ],
)
def test_of_a_damaged_message_the_rest_is_read(store: Store, damage: str, read: str, places: int) -> None:
    conversation = talked(store, "hi", "hello", "more", "yes")
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute(f"UPDATE messages SET {damage} WHERE id = 2").rowcount == 1
        db.commit()
    notes: list[str] = []
    with closing(Store(store.path, notes.append)) as other:
        loaded = other.load(conversation.id)
        assert " ".join(message.text for message in loaded.path(loaded.leaf)) == read
        assert [f"damaged in {places} places" in note for note in notes] == [True] * bool(places)
        assert [row.title for row in other.list("more")] == ["hi"]
        loaded.leaf = loaded.add("user", "on", parent=loaded.leaf).id
        other.save(loaded, loaded.messages[5])
        assert other.load(conversation.id) == loaded


def test_a_file_of_the_first_version_stays_as_it_is_when_messages_get_a_new_field(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from ferrum_mlx.chat import rows; rows.COLUMNS += ('brand_new',)\n"
        "from ferrum_mlx.chat.database import Database; Database(Path(sys.argv[1])).close()\n"
    )
    new, now = tmp_path / "new.db", tmp_path / "now.db"
    subprocess.run([sys.executable, "-c", code, new], check=True)
    Store(now).close()
    first, made = (schema(path) for path in (new, now))
    assert first == made
    assert made == {*COLUMNS, "conversation", "revision"}  # a field more needs a step that adds its column


def schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {name for _, name, *_ in db.execute("PRAGMA table_info(messages)")}


def test_another_process_that_writes_is_waited_for_and_then_named(store: Store) -> None:
    conversation = talked(store, "hi")
    store.wait_at_most(0.01)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SessionsBusyError, match="another process holds it"):
            store.save(conversation, conversation.messages[1])
        assert store.load(conversation.id) == conversation  # who reads does not wait
    store.save(conversation, conversation.messages[1])


def test_a_book_writes_what_had_to_wait_in_its_order(store: Store) -> None:
    told: list[FerrumError] = []
    conversation = Conversation()
    book = Book(conversation, store, told.append)
    store.wait_at_most(0.01)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked = conversation.add("user", "hi", parent=None)
        gone = conversation.add("assistant", "", parent=asked.id)
        book.stand_at(gone.id, asked, gone)
        book.stand_at(asked.id)
        book.drop(gone)
        answer = conversation.add("assistant", "hello", parent=asked.id)
        book.stand_at(answer.id, answer)
        book.rename("mine")
        assert book.waiting
        assert store.list() == []
        assert [type(error) for error in told] == [SessionsBusyError]  # once
    book.retry()
    assert not book.waiting
    assert conversation.id is not None
    with closing(Store(store.path)) as another:
        assert another.load(conversation.id) == conversation


def test_a_rename_elsewhere_is_not_undone(store: Store) -> None:
    mine = talked(store, "hi", "hello")
    book = Book(mine, store, pytest.fail)
    with closing(Store(store.path)) as other:
        other.rename(mine.id, "theirs")
        theirs = other.load(mine.id)
        Book(theirs, other, pytest.fail).set_system("be brief")
    asked = mine.add("user", "more", parent=2)
    book.stand_at(asked.id, asked)
    book.stand_at(2)
    assert store.list()[0].title == "theirs"
    assert store.load(mine.id).system == "be brief"
    book.rename("mine after all")
    assert store.list()[0].title == "mine after all"


def test_the_latest_beside_the_one_in_hand(store: Store) -> None:
    first, second = talked(store, "one", "1").id, talked(store, "two").id
    assert [store.latest(beside) for beside in (None, first, second)] == [second, second, first]


def test_damage_within_is_told_when_it_is_met(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with closing(Store(path)) as store:
        session = talked(store, *["x" * 3000] * 20).id
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = b"\xff" * (len(data) - 4096 * 3)
    path.write_bytes(data)
    with pytest.raises(FerrumError, match=r"malformed.*move the file away"), closing(Store(path)) as store:
        store.load(session)
