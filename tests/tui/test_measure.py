"""That `python -m ferrum_tui.measure` measures what it says; on the fake backend no figure of it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ferrum_tui import measure
from ferrum_tui.trial import HEAVY, Answered, Trial, chat, plain, steps_after

FAKE = ("--backend", "fake")


def test_steps_are_counted_from_the_key_on() -> None:
    times = (0.9, 1.0, 1.01, 1.08, 1.2)
    records: list[Any] = [{"event": "step", "time": time, "stats": {"forward_s": 0.01}} for time in times]
    records.insert(3, {"event": "aborted", "time": 1.05})
    records.append({"event": "step", "time": 1.21, "stats": {"forward_s": 0.0}})
    assert steps_after(records, 1.0) == 3


def test_runs_that_say_other_things_are_told_apart() -> None:
    one = Answered("once upon a time", 160, 50.0)
    assert measure.same_answers([(one, Answered("once upon a time", 160, 40.0))])[3]
    for other in (Answered("once upon a tide", 160, 50.0), Answered("once upon a time", 159, 50.0)):
        what, figure, _, met = measure.same_answers([(one, one), (one, other)])
        assert (figure, met) == ("1 of 2 pairs, 160 tokens", False), what


def test_the_screen_and_the_linear_mode_are_asked_the_same() -> None:
    with chat(1, *FAKE) as trial:
        trial.terminal.wait_for("ready")
        trial.terminal.send(measure.PROMPT + "\r")
        shown = trial.answered()
    linear = plain(1, *FAKE)
    assert measure.same_answers([(shown, linear)])[3]
    assert (shown.tokens, len(shown.text)) == (160, 160)


def test_a_long_conversation_is_on_screen_and_its_idle_time_is_seen() -> None:
    with chat(1, *FAKE, turns=100) as trial:
        trial.terminal.wait_for("ready")
        idle = trial.idle(0.5)
        assert 0 <= idle < 2
        assert "x = 99" in trial.terminal.text
        imported = trial.imported()
    assert {"textual", "ferrum_tui"} <= imported
    assert imported & set(HEAVY) == set()


def test_what_is_pure_python_is_seen_among_the_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a program that loads transformers, which no look at its memory would show."""
    (tmp_path / "transformers.py").touch()
    (tmp_path / "usercustomize.py").write_text("import transformers\n")
    (tmp_path / "sitecustomize.py").write_text("import transformers\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with chat(1, *FAKE) as trial:
        trial.terminal.wait_for("Ask something")
        assert trial.imported() & set(HEAVY) == {"transformers"}


def test_a_program_that_works_while_idle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 1.5))
    monkeypatch.setattr(Trial, "_cpu_seconds", lambda self: next(seconds))
    monkeypatch.setattr(Trial, "read_for", lambda self, s: None)
    assert Trial(None, Path()).idle(1.0) > 0.01  # type: ignore[arg-type]
