"""The commands of a chat on a pipe: turns, branches, settings, files; the fake model answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = ("chat", "--backend", "fake", "--max-tokens", "10")


def answers(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done.stdout.splitlines()


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ferrum-mlx: ")]


def test_regen_edit_and_branch(ferrum: Run) -> None:
    lines = ["one", "/set temperature=1 seed=1", "/regen", "more", "/branch 1", "more", "/edit other"]
    done = ferrum(*FAKE, stdin="\n".join(lines))
    first, second, behind_second, behind_first, other = answers(done)
    assert done.returncode == 0
    assert first != second
    assert behind_first != behind_second
    plain = ferrum(*FAKE, stdin="one\n/set temperature=1 seed=1\nmore\n/new\none\n/new\nother")
    assert answers(plain)[:2] == [first, behind_first]
    assert other not in answers(plain)[2:]  # it stands behind the first prompt and answer


def test_continue_goes_on_where_the_answer_ends(ferrum: Run) -> None:
    done = ferrum(*FAKE, stdin="hello\n/continue\n/export\nnext\n")
    head, tail, _ = answers(done)
    whole = ferrum("chat", "--backend", "fake", "--max-tokens", "20", stdin="hello\n")
    assert len(head) == len(tail) == 10
    assert answers(whole)[0].startswith(head)
    assert f"prompt {len('hello') + 20 + len('next') + 3} tokens" in done.stderr


def test_export_writes_what_was_said(ferrum: Run, tmp_path: Path) -> None:
    done = ferrum(
        *FAKE, stdin="hi\n/regen\n/export a.md\n/export b.json\n/export a.md\n/rename T t\n/export\n"
    )
    said = answers(done)
    assert (tmp_path / "a.md").read_text().count("\n## fake") == 1
    assert said[0] in (tmp_path / "a.md").read_text()
    assert [m["text"] for m in json.loads((tmp_path / "b.json").read_text())["messages"]] == ["hi", *said]
    assert len(errors(done)) == 1
    assert "a.md is there already" in errors(done)[0]
    assert (tmp_path / "t-t.md").exists()


def test_settings_of_the_chat(ferrum: Run) -> None:
    lines = [
        "/set",
        "/set top_p=7",
        "/set max_tokens=4",
        "hi",
        "/system be kind",
        "/think on",
        "hi",
        "/system",
    ]
    done = ferrum(*FAKE, stdin="\n".join([*lines, "/system none", "/model", "/engine"]))
    assert [len(answer) for answer in answers(done)] == [4, 4]
    assert done.returncode == 2
    assert "temperature=0 " in done.stderr
    assert "top_p is 7; allowed" in errors(done)[0]
    assert "system message: be kind" in done.stderr
    assert "system message: none" in done.stderr
    assert "the model is fake; the catalogue has smollm2" in done.stderr
    assert "2 requests ended, 8 tokens made" in done.stderr
    setting = len(json.dumps({"thinking": True}))
    assert f"prompt {setting + len('be kind' + 'hihi') + 4 + 4} tokens" in done.stderr


def test_another_model_and_one_that_is_not_there(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--offline", stdin="hi\n/model other\nhi\n/quit\nnever\n")
    assert len(answers(done)) == 2
    assert done.stderr.count("fake on fake") == 2
    assert done.returncode == 0


def test_what_the_linear_mode_cannot_do_is_told(ferrum: Run) -> None:
    lines = [
        "/copy",
        "/compare x",
        "/theme",
        "/regen",
        "/continue",
        "/edit",
        "/branch next",
        "/nwe",
        "/new x",
    ]
    done = ferrum(*FAKE, stdin="\n".join([*lines, "/sessions", "/resume", "/delete", "fine"]))
    assert len(answers(done)) == 1
    assert done.returncode == 2
    assert len(errors(done)) == 12
    for said in (
        "/copy needs the screen",
        "did you mean /new",
        "nothing has been asked",
        "no answer to continue",
    ):
        assert said in done.stderr
    assert "this chat keeps no sessions; on a pipe, --resume does" in done.stderr


def test_help_names_every_command_of_this_mode(ferrum: Run) -> None:
    said = ferrum(*FAKE, stdin="/help\n").stderr
    for usage in ("/branch next|prev|N", "/resume [ID]", "/export [FILE]", "/quit", "@FILE"):
        assert usage in said
    assert "/copy" not in said


def test_a_slash_that_begins_a_text(ferrum: Run) -> None:
    plain = answers(ferrum(*FAKE, stdin="/usr/bin is\n"))
    assert answers(ferrum(*FAKE, stdin="//usr/bin is\n")) == plain


def test_files_go_along(ferrum: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = ferrum(*FAKE, stdin="see @a.txt\n@no/such\nfine\n")
    sent = "see @a.txt\n\na.txt:\n```txt\ntext\n```"
    assert "attached a.txt" in done.stderr
    assert f"prompt {len(sent) + 1} tokens" in done.stderr
    assert ["@no/such is not there" in line for line in errors(done)] == [True]
    assert len(answers(done)) == 2


def test_a_conversation_that_is_full_gives_way_to_a_new_one(ferrum: Run) -> None:
    small = (*FAKE, "--max-model-len", "64")
    done = ferrum(*small, stdin=f"{'x' * 20}\n" * 3 + "y" * 70 + "\nlast\n")
    said = answers(done)
    assert len(said) == 4
    assert said[2] == said[0]  # the third has no room behind the two
    assert done.stderr.count("the conversation is full: this prompt begins a new one") == 2
    assert len(errors(done)) == 1  # of the prompt that is too long alone
    assert done.returncode == 2
