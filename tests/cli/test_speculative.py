"""Guessing ahead, as the command line shows it: the same answers, and numbers of the guesses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAKE = ("run", "--backend", "fake", "--max-tokens", "80")


def ask(ferrum: Run, *args: str) -> dict[str, Any]:
    done = ferrum(*FAKE, "--json", "hello hello hello", *args)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("kind", ["ngram", "self", "draft:fake"])
def test_the_same_answer_and_its_numbers(ferrum: Run, kind: str) -> None:
    plain, answer = ask(ferrum), ask(ferrum, "--speculative", kind)
    assert "speculation" not in plain
    assert answer["token_ids"] == plain["token_ids"]
    numbers = answer["speculation"]
    assert list(numbers) == [
        *("kind", "drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_acceptance_length"),
        *("draft_s", "why_off"),
    ]
    assert numbers["kind"] == kind
    drafted, accepted = numbers["drafted_tokens"], numbers["accepted_tokens"]
    assert accepted == (0 if kind == "ngram" else drafted)  # a second fake is right always
    assert numbers["acceptance_rate"] == (accepted / drafted if drafted else 0.0)
    assert numbers["mean_acceptance_length"] >= 1.0


def test_the_closing_line_tells_of_guesses(ferrum: Run) -> None:
    assert "guesses" not in ferrum(*FAKE, "hello").stderr
    said = ferrum(*FAKE, "hello", "--speculative", "self", "--draft-tokens", "4").stderr
    assert "guesses right]" in said


def test_what_is_no_kind_is_a_usage_error(ferrum: Run) -> None:
    done = ferrum(*FAKE, "hello", "--speculative", "fast")
    assert done.returncode == 2
    assert "'off', 'ngram', 'self', or 'draft:MODEL'" in done.stderr
