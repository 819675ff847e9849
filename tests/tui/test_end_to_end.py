"""The real program with the real default model, as a person at a terminal has it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.chat.store import Store

from .glass import Glass

STORY = "Write a long story about a lighthouse keeper and the sea."
OPTIONS = ["--backend", "mlx", "--offline", "--temperature", "0", "--max-tokens", "2000"]
KEPT_EVERY = 1.0  # seconds of an answer that a crash may cost
HEAD = re.compile(r"smollm2-135m  \d\d:\d\d")


@pytest.fixture
def env(smollm2: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home with nothing in it but the model; one thread for the engine."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.delenv("NO_COLOR", raising=False)
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    stale = {"COLUMNS": "70", "LINES": "25"}  # as a shell exports them
    return {"HOME": str(home), "FERRUM_CACHE": str(smollm2.path.parents[2]), **threads, **stale}


@pytest.fixture
def glass(env: dict[str, str]) -> Iterator[Glass]:
    with Glass(OPTIONS, env, columns=90, rows=30) as glass:
        yield glass


def answer(glass: Glass) -> list[str]:
    """The words of the last answer that is on the screen."""
    lines = [line.strip(" │▁▂▃▄▅▆▇█▊▎") for line in glass.lines]
    heads = [at for at, line in enumerate(lines) if HEAD.search(line)]
    if not heads:
        return []
    below = takewhile(lambda line: "tok/s" not in line and line[:1] != "╰", lines[heads[-1] + 1 :])
    return " ".join(below).split()


def chat(glass: Glass) -> str:
    """What is in the box of the conversation."""
    return "\n".join(takewhile(lambda line: line[:1] != "╰", glass.lines[2:]))


def whole(glass: Glass) -> bool:
    """The title, the chat, the prompt and the keys are where they belong, and it goes on."""
    lines = glass.lines
    boxes = lines[1][:1] + lines[1][-1:], lines[-2][:1] + lines[-2][-1:]
    goes_on = any("● generating" in line for line in lines)
    return "ferrum" in lines[0] and boxes == ("╭╮", "╰╯") and "Send" in lines[-1] and goes_on


def begin_a_story(glass: Glass, words: int = 12) -> None:
    glass.see("○ ready", "Ask something")
    glass.send(STORY + "\r")
    glass.until(lambda: len(answer(glass)) >= words, f"{words} words")
    assert "● generating" in glass.shown


def test_start_stream_stop_quit_and_resume(glass: Glass, env: dict[str, str]) -> None:
    glass.see("smollm2-135m")
    begin_a_story(glass)
    glass.send("\x1b")
    glass.see("■ stopped", "○ ready")
    came = answer(glass)
    assert len(came) >= 12
    glass.send("\x04")
    assert glass.end() == 0
    assert glass.restored
    with Glass([*OPTIONS, "--resume"], env, columns=90, rows=30) as again:
        again.see(STORY, "■ stopped", "○ ready")
        assert answer(again) == came
        again.send("Tell it again, and longer.\r")
        again.until(lambda: "again, and" in again.shown and 5 <= len(answer(again)) != len(came), "an answer")
        assert "● generating" in again.shown
        again.send("\x03")  # stops
        again.see("○ ready")
        again.send("\x03")
        again.see("Ctrl+C again quits")
        again.send("\x03")
        assert again.end() == 0
        assert again.restored


@pytest.mark.slow
def test_scroll_resize_and_paste_while_it_streams(glass: Glass) -> None:
    glass.see("○ ready")  # a size that changes while the app starts may be missed
    glass.resize(60, 20)
    begin_a_story(glass)
    glass.until(lambda: STORY[:20] not in chat(glass) and not answer(glass), "more than a screen")
    glass.send("\x1b[5~")  # PgUp
    glass.see("End follows")
    before = [line[:55] for line in glass.lines[2:8]]  # beside them is the scrollbar, which moves
    glass.see("new lines · End follows")
    assert [line[:55] for line in glass.lines[2:8]] == before
    glass.send("\x1b[F")
    glass.until(lambda: "End follows" not in glass.shown, "the end")
    for columns, rows in ((80, 24), (40, 12), (60, 20)):
        glass.resize(columns, rows)
        glass.until(lambda: whole(glass), "a whole screen")
        last = chat(glass)
        glass.until(lambda last=last: chat(glass) != last, "new words")  # type: ignore[misc]
    glass.send("\x1b[200~one\ntwo\n\nthree\x1b[201~")
    glass.see("│ one", "│ two", "│ three", "● generating")
    glass.send("\x1b")
    glass.see("■ stopped", "│ three")
    glass.send("\x1b[D\x04")  # Left, and Ctrl+D, which ends no chat that has a draft
    glass.until(lambda: "│ thre " in glass.shown, "one letter less")
    glass.send("\x11")
    assert glass.end() == 0
    assert glass.restored


@pytest.mark.slow
def test_killed_in_the_middle_of_an_answer(glass: Glass, env: dict[str, str]) -> None:
    begin_a_story(glass)
    glass.send("\x1b")
    glass.see("■ stopped", "○ ready")
    glass.send("Tell it again, and longer.\r")
    glass.until(lambda: "● generating" in glass.shown and len(answer(glass)) >= 12, "a second answer")
    shown, at = answer(glass), time.monotonic()
    glass.until(lambda: time.monotonic() - at > KEPT_EVERY + 0.5)
    words = len(answer(glass))
    glass.until(lambda: len(answer(glass)) > words, "more")  # the screen has had the time to keep them
    os.killpg(glass.process.pid, signal.SIGKILL)
    glass.process.wait()
    store = Store()
    number = store.latest()
    assert number is not None
    conversation = store.load(number)
    store.close()
    kept = conversation.path(conversation.leaf)
    assert [message.role for message in kept] == ["user", "assistant"] * 2
    assert kept[3].text.split()[: len(shown) - 1] == shown[:-1]  # of the last word a part was shown
    with Glass([*OPTIONS, "--resume"], env, columns=90, rows=30) as again:
        again.see("Tell it again", "■ broken off", "○ ready")
        assert answer(again)[: len(shown) - 1] == shown[:-1]
        again.send("/continue\r")
        again.see("● generating")
        again.until(lambda: len(answer(again)) > len(kept[3].text.split()), "the rest")
        again.send("\x04")
        assert again.end() == 0
