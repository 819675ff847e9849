"""What an engine sees of it: limits, counts, and a proposer that fails."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ferrum_mlx.request import Request
from ferrum_mlx.speculative.ngram import NgramProposer
from ferrum_mlx.speculative.speculation import Speculation

from .guessing import FAR, Clock, Guesser, Machine, a_request


def learned(max_drafts: int = 16) -> Machine:
    """One that drafts: steps without drafts are measured, and guesses come true."""
    return Machine(1.0, lambda drafts: 1 + 0.01 * drafts, max_drafts=max_drafts).run(100)


def test_never_more_than_the_answer_may_still_have() -> None:
    machine = learned()
    (request,) = machine.requests
    for left in range(5, 0, -1):
        request.output = [0] * (FAR - left)
        machine.speculation.propose([request], FAR)
        assert len(request.drafts) <= left - 1
    assert request.drafts == []


def test_never_more_than_is_allowed_or_has_room() -> None:
    machine = learned(max_drafts=3)
    (request,) = machine.requests
    machine.speculation.propose([request], FAR)
    assert len(request.drafts) == 3
    machine.speculation.propose([request], 2)
    assert len(request.drafts) == 2
    machine.speculation.propose([request], 0)
    assert request.drafts == []
    assert "no room" in machine.speculation.stats().why


def test_counts_and_rates() -> None:
    speculation = Speculation(NgramProposer(), name="ngram", max_drafts=4)
    assert speculation.stats().acceptance_rate == 0.0
    assert speculation.stats().mean_acceptance_length == 1.0
    request = a_request()
    speculation.verified(request, 4, 3)
    speculation.verified(request, 2, 0)
    stats = speculation.stats()
    assert (stats.name, stats.drafted, stats.accepted, stats.verifies) == ("ngram", 6, 3, 2)
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.5, 2.5)


def test_guessing_is_timed() -> None:
    machine = Machine(1.0, lambda drafts: 1 + 0.01 * drafts, draft_seconds=0.1, max_drafts=8).run(200)
    assert machine.speculation.stats().draft_seconds == pytest.approx(
        0.1 * sum(max(wanted.values()) for wanted in machine.guesser.asked)
    )


def test_a_proposer_that_fails_is_left_out_and_said_so() -> None:
    class Failing(Guesser):
        def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
            self.asked.append(wanted)
            raise MemoryError("no more")

    failing = Failing(Clock())
    speculation, request = Speculation(failing, name="x", max_drafts=4), a_request()
    request.drafts = [1]
    for _ in range(3):
        speculation.propose([request], FAR)
        assert request.drafts == []
    assert len(failing.asked) == 1
    assert speculation.stats().why == "the proposer failed: MemoryError: no more"
    assert not speculation.wants([request])
    note = "runs without speculation from now on: the proposer failed: MemoryError: no more"
    assert [speculation.take_notes(), speculation.take_notes()] == [[note], []]


def test_a_cheap_proposer_that_fails_when_it_is_only_asked_whether() -> None:
    class Failing(Guesser):
        cheap = True

        def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
            raise MemoryError("no more")

        def forget(self, request: Request) -> None:
            raise MemoryError("not even that")

    speculation = Speculation(Failing(Clock()), name="x", max_drafts=4)
    assert not speculation.wants([a_request()])
    speculation.forget(a_request())
    assert len(speculation.take_notes()) == 2


def test_it_is_asked_for_only_when_it_would_draft() -> None:
    machine = Machine(0.0, lambda drafts: 1 + 0.2 * drafts)
    assert not machine.speculation.wants(machine.requests)  # steps without drafts are measured first
    machine.run(300)
    while not machine.lengths[-1]:
        machine.run(1)
    assert not machine.speculation.wants(machine.requests)  # the allowance for a probe is used up
    good = learned()
    assert good.speculation.wants(good.requests)
    assert not good.speculation.wants([])


def test_a_forgotten_request_starts_anew() -> None:
    machine = learned()
    (request,) = machine.requests
    machine.speculation.forget(request)
    machine.speculation.forget(request)
    length = machine.speculation._length
    assert (length._turns, length._trusts, length._acceptance._own) == ({}, {}, {})
