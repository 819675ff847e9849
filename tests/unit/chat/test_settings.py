"""The settings file: what it may say, what is said of the rest, and that changes leave it the user's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ferrum_mlx.chat.settings import Settings, load, save, settings_file
from ferrum_mlx.errors import FerrumError, UsageError

WHOLE = """\
# my settings
theme = "nord"   # dark
model = "qwen3-8b"

[sampling]
temperature = 0.7  # warm
stop = ["END"]

[keys]
"chat.regenerate" = "f5,ctrl+r"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_the_whole_file(file: Path) -> None:
    file.write_text(WHOLE + "\n[other]\nx=1\n")
    settings, notes = load(file)
    assert settings == Settings(
        theme="nord",
        model="qwen3-8b",
        sampling={"temperature": 0.7, "stop": ("END",)},
        keys={"chat.regenerate": "f5,ctrl+r"},
    )
    assert [note.startswith(f"{file}: 'other' is no setting") for note in notes] == [True]


def test_no_file_is_the_defaults(file: Path) -> None:
    assert load(file) == (Settings(), [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "thme = 'x'",
            "'thme' is no setting; allowed: model, theme, panel, system, thinking, sampling, keys; did",
        ),
        ("theme = 3", "theme is 3; allowed: a text"),
        ("panel = 'yes'", "panel is 'yes'; allowed: true or false"),
        ("sampling = 3", "sampling is 3; allowed: a table, [sampling]"),
        ("[sampling]\ntemprature = 1", "[sampling] 'temprature' is nothing to set; allowed: temperature"),
        ("[sampling]\ntop_p = 2", "[sampling] top_p is 2; allowed: above 0"),
        ("[sampling]\nn = 2", "[sampling] 'n' is nothing to set"),
        ("[sampling]\ntemperature = 0\nxtc_probability = 0.5", "none of the table is used"),
        ("[keys]\nx = 3", "[keys] x is 3; allowed: keys"),
        ("[keys]\nx = 'a,,b'", "[keys] x is 'a,,b'"),
    ],
)
def test_a_wrong_entry_is_told_and_the_rest_taken(text: str, said: str, file: Path) -> None:
    file.write_text(f'system = "kind"\n{text}')
    settings, notes = load(file)
    assert settings == Settings(system="kind")
    assert len(notes) == 1
    assert str(file) in notes[0]
    assert said in notes[0]


@pytest.mark.parametrize("content", [b"theme = ", b"\xff\xfe\x00", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_told_and_not_changed(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    settings, notes = load(file)
    assert settings == Settings()
    assert [f"{file} is not used" in note for note in notes] == [True]
    with pytest.raises(FerrumError, match="cannot change"):
        save({"theme": "x"}, file)
    assert file.read_bytes() == content


def test_changes_keep_comments_and_order(file: Path) -> None:
    file.write_text(WHOLE)
    save({"theme": "gruvbox", "model": None, "sampling": {"temperature": 0.2, "stop": None}}, file)
    save({"keys": {"chat.stop": "f6"}, "panel": False}, file)
    text = file.read_text()
    assert '# my settings\ntheme = "gruvbox"   # dark\n' in text
    assert "temperature = 0.2  # warm\n" in text
    assert load(file) == (
        Settings(
            theme="gruvbox",
            panel=False,
            sampling={"temperature": 0.2},
            keys={"chat.regenerate": "f5,ctrl+r", "chat.stop": "f6"},
        ),
        [],
    )


def test_a_first_change_makes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "config.toml"
    save({"sampling": {"stop": ("a", "b"), "seed": None}, "thinking": True, "theme": None}, file)
    assert load(file) == (Settings(thinking=True, sampling={"stop": ("a", "b")}), [])


@pytest.mark.parametrize("changes", [{"thme": "x"}, {"theme": 3}, {"sampling": {"top_p": 7}}, {"keys": 3}])
def test_a_wrong_change_changes_nothing(changes: dict[str, object], file: Path) -> None:
    file.write_text(WHOLE)
    with pytest.raises(UsageError):
        save({"panel": False, **changes}, file)
    assert file.read_text() == WHOLE


def test_a_link_stays_one_and_rights_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles.toml", tmp_path / "config.toml"
    real.write_text(WHOLE)
    real.chmod(0o640)
    link.symlink_to(real)
    save({"theme": "x"}, link)
    assert link.is_symlink()
    assert load(real)[0].theme == "x"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file.write_text(WHOLE)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FerrumError, match="No space left"):
        save({"theme": "x"}, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_text() == WHOLE


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRUM_CONFIG", str(tmp_path / "mine.toml"))
    save({"theme": "x"})
    assert settings_file() == tmp_path / "mine.toml"
    assert load()[0].theme == "x"
