"""Files in prompts: which @ is one, what the model is given, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ferrum_mlx.chat.attachments import MOST_BYTES, attach, complete, reference
from ferrum_mlx.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own."""
    here = tmp_path / "here"
    (here / "src" / "deep").mkdir(parents=True)
    (here / "notes.txt").write_text("one\ntwo\n")
    (here / "my file.md").write_text("```\ncode\n```")
    (here / "src" / "main.py").write_bytes(b"x = 1\r\n\x1b[2Jy\r")
    (here / "src" / "deep" / "notes.py").write_text("")
    (here / ".hidden").write_text("secret")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    return here


def test_files_follow_the_prompt_in_fences() -> None:
    done = attach('Compare @notes.txt with @"my file.md" and @src/main.py, please. @notes.txt!')
    assert done.names == ("notes.txt", "my file.md", "src/main.py")
    assert done.text_for_model == (
        'Compare @notes.txt with @"my file.md" and @src/main.py, please. @notes.txt!\n\n'
        "notes.txt:\n```txt\none\ntwo\n```\n\n"
        "my file.md:\n````md\n```\ncode\n```\n````\n\n"
        "src/main.py:\n```py\nx = 1\n[2Jy\n```"
    )
    assert attach("@~/notes.txt").names == ("~/notes.txt",)


@pytest.mark.parametrize(
    "text",
    [
        "no reference",
        "mail me@notes.txt",
        "@property",
        "@someone: hi",
        "@app.route('/x')",
        "@functools.cache",
        "a @ b",
        "`@notes.txt`",
        "```\n@notes.txt\n```\nand",
        "~~~\n@notes.txt",
    ],
)
def test_texts_stay_as_they_are(text: str) -> None:
    assert (attach(text).text_for_model, attach(text).names) == (text, ())


def test_a_second_sign_takes_the_meaning_away() -> None:
    assert attach("see @@notes.txt and @@types/node").text_for_model == "see @notes.txt and @types/node"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@src/mian.py", "@src/mian.py is not there; did you mean 'src/main.py'?"),
        ("@note.txt", "did you mean 'notes.txt'?"),
        ('@"no such"', "@no such is not there"),
        ("@types/node", "@types/node is not there; type @@"),
        ("@notes.txt/x", "is not there"),
        ("@src", "@src is a folder"),
        ("@fifo", "no ordinary file"),
        ("@big", f"1,000,001 bytes; allowed: at most {MOST_BYTES:,}"),
        ("@binary", "@binary is no UTF-8 text"),
        ("@nul", "@nul is no UTF-8 text"),
    ],
)
def test_what_is_no_text_file_is_refused(text: str, said: str, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "big").write_bytes(b"x" * (MOST_BYTES + 1))
    (folder / "binary").write_bytes(b"\xff\xd8\xff")
    (folder / "nul").write_bytes(b"a\0b")
    with pytest.raises(UsageError) as raised:
        attach(text)
    assert said in str(raised.value)


def test_completion_goes_into_folders_and_skips_hidden_files() -> None:
    assert complete("") == ["my file.md", "notes.txt", "src/"]
    assert complete("NO") == ["notes.txt", "src/deep/notes.py"]
    assert complete("main") == ["src/main.py"]
    assert complete("src/") == ["src/deep/", "src/main.py"]
    assert complete("~/n") == ["~/notes.txt"]
    assert complete(".h") == [".hidden"]
    assert complete("none/") == complete("\0/") == complete("~nobody-of-that-name/") == []
    assert [reference(path) for path in ("a.txt", "my file.md")] == ["@a.txt", '@"my file.md"']


def test_completion_is_bounded(folder: Path) -> None:
    for n in range(120):
        (folder / f"many{n}").touch()
    assert len(complete("many")) == 50
