"""Conversations as Markdown and JSON files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.export import to_json, to_markdown, write
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.metrics import Usage


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation(title="On blocks", system="be\n\nkind")
    asked = made.add("user", "Explain @a.py", parent=None)
    asked.attached, asked.created = ("a.py",), 0.0
    first = made.add("assistant", "No.", parent=1)
    first.model, first.ending = "tiny", "stop"
    second = made.add("assistant", "# Yes\n\n```py\nx\n```\n", parent=1)
    second.model, second.label, second.ending, second.thinking = "tiny", "temperature=1", "abort", "well\nhm"
    second.usage = Usage(5, 6, 0)
    made.leaf = second.id
    return made


def test_markdown_is_the_branch(conversation: Conversation) -> None:
    text = to_markdown(conversation, 3)
    assert text.startswith("# On blocks\n\nSystem message:\n\n> be\n>\n> kind\n\n## You – ")
    assert "Explain @a.py\n\nAttached: a.py\n\n## tiny (temperature=1) – " in text
    assert text.endswith("> well\n> hm\n\n# Yes\n\n```py\nx\n```\n\n*(stopped)*\n")
    assert "No." not in text
    assert to_markdown(conversation, 2).endswith("\n\nNo.\n")


def test_json_has_every_branch_and_field(conversation: Conversation) -> None:
    whole = json.loads(to_json(conversation))
    assert (whole["format"], whole["version"], whole["leaf"]) == ("ferrum-mlx conversation", 1, 3)
    assert [(m["id"], m["parent"], m["text"][:3]) for m in whole["messages"]] == [
        (1, None, "Exp"),
        (2, 1, "No."),
        (3, 1, "# Y"),
    ]
    assert set(whole["messages"][0]) == {field.name for field in fields(Message)}
    assert whole["messages"][2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 0}


def test_the_suffix_decides(conversation: Conversation, tmp_path: Path) -> None:
    conversation.messages[3].text = "é \x1b[2J \ud800"
    markdown, as_json = (write(conversation, 3, tmp_path / name) for name in ("a.md", "b.JSON"))
    assert "é [2J ?" in markdown.read_text(encoding="utf-8")
    assert json.loads(as_json.read_bytes())["title"] == "On blocks"
    with pytest.raises(UsageError, match=r"'\.txt'; allowed: \.md"):
        write(conversation, 3, tmp_path / "c.txt")


def test_a_file_is_never_overwritten(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("mine")
    with pytest.raises(UsageError, match=r"a\.md is there already"):
        write(conversation, 3, tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text() == "mine"
    with pytest.raises(FerrumError, match="cannot write"):
        write(conversation, 3, tmp_path / "no folder" / "a.md")


def test_without_a_name_the_title_gives_it(
    conversation: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(write(conversation, 3)) for _ in range(2)] == ["on-blocks.md", "on-blocks-2.md"]
    conversation.title = "../?"
    assert str(write(conversation, 3)) == "chat.md"


def test_nothing_to_write() -> None:
    with pytest.raises(UsageError, match="nothing to export"):
        write(Conversation(), None)
