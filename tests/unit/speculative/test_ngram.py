"""Prompt lookup against a search of the whole context by brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_mlx.speculative import ngram
from ferrum_mlx.speculative.ngram import LONGEST, PLACES, SHORTEST, NgramProposer

from .guessing import a_request

FEW = st.lists(st.integers(0, 3), max_size=60)


def common_suffix(tokens: list[int], end: int) -> int:
    """How many tokens up to and with `end` are those at the very end."""
    pairs = zip(reversed(tokens[: end + 1]), reversed(tokens), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def by_brute_force(tokens: list[int], count: int) -> list[int]:
    """Behind the longest earlier match, the latest of equal ones, copied as a decompressor copies."""
    lengths = [(min(common_suffix(tokens, end), LONGEST), end) for end in range(len(tokens) - 1)]
    candidates = [pair for pair in lengths if pair[0] >= SHORTEST][-PLACES:]
    if not candidates:
        return []
    known = list(tokens)
    end = max(candidates)[1]
    for i in range(count):
        known.append(known[end + 1 + i])
    return known[len(tokens) :]


@given(prompt=FEW, output=FEW.filter(bool), count=st.integers(1, 20))
def test_the_longest_match_wins_then_the_latest(prompt: list[int], output: list[int], count: int) -> None:
    request = a_request(prompt)
    request.output = output
    assert NgramProposer().propose({request: count})[request] == by_brute_force(prompt + output, count)


@given(prompt=FEW, output=FEW, cuts=st.lists(st.integers(1, 60), max_size=8))
def test_any_way_of_growing_gives_the_same(prompt: list[int], output: list[int], cuts: list[int]) -> None:
    """The index holds what a fresh one would."""
    request, proposer = a_request(prompt), NgramProposer()
    for end in sorted({*cuts, len(output)}):
        request.output = output[:end]
        guesses = proposer.propose({request: 5})[request]
        assert guesses == NgramProposer().propose({request: 5})[request]


def test_the_prompt_and_the_output_are_looked_up() -> None:
    request = a_request([1, 2, 3, 4, 5, 1, 2])
    request.output = [3]
    proposer = NgramProposer()
    assert proposer.propose({request: 2})[request] == [4, 5]
    request.output = [9, 8, 7, 9, 8]
    proposer.forget(request)
    assert proposer.propose({request: 3})[request] == [7, 9, 8]


def test_a_loop_goes_on() -> None:
    request = a_request([7, 1, 2])
    request.output = [1, 2]
    assert NgramProposer().propose({request: 7})[request] == [1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize(("match", "trust"), [(2, 0), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (40, 3)])
def test_a_longer_match_is_trusted_more(match: int, trust: int) -> None:
    text = list(range(match))
    request = a_request([*text, 77, 88])
    request.output = text
    proposer = NgramProposer()
    assert proposer.propose({request: 1})[request] == [77]
    assert proposer.trust(request) == trust


def test_no_match_is_no_guess() -> None:
    request = a_request([1, 2, 3])
    assert NgramProposer().propose({request: 4}) == {request: []}


def test_a_step_costs_its_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the context, and however often its last pair stood there."""
    compared = 0
    real = ngram.History._common

    def counting(self: ngram.History, place: int) -> int:
        nonlocal compared
        compared += 1
        return real(self, place)

    monkeypatch.setattr(ngram.History, "_common", counting)
    request, proposer = a_request([1, 2, 3] * 1000), NgramProposer()
    request.output = [4, 1]
    proposer.propose({request: 4})
    compared = 0
    request.output = [4, 1, 2]
    proposer.propose({request: 4})
    assert 0 < compared <= PLACES
    proposer.propose({request: 4})  # nothing new
    assert compared <= PLACES


def test_forgetting_is_idempotent_and_complete() -> None:
    request, proposer = a_request([1, 2, 1]), NgramProposer()
    proposer.propose({request: 4})
    proposer.forget(request)
    proposer.forget(request)
    assert proposer._histories == {}
