"""How many drafts: never a loss worth speaking of, and near the best fixed number where they pay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_mlx.speculative.length import Offer, best_plan

from .guessing import Machine, a_request

TOKENS = 1000
COSTS: dict[str, Callable[[int], float]] = {
    "cheap rows": lambda drafts: 1 + 0.05 * drafts,
    "dear rows": lambda drafts: 1 + 0.15 * drafts,
    "a dear first row": lambda drafts: 1 + (1 + 0.05 * drafts if drafts else 0),
    "a stair": lambda drafts: 1 + 0.6 * (drafts // 5),
}


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("draft_seconds", [0.0, 0.25])
def test_drafts_that_never_come_true_cost_less_than_3_percent(
    cost: str, noise: float, draft_seconds: float
) -> None:
    machine = Machine(0.0, COSTS[cost], noise=noise, draft_seconds=draft_seconds).run(TOKENS)
    plain = Machine(0.0, COSTS[cost], noise=noise).run(TOKENS, fixed=0)
    drafted = sum(map(machine._cost, machine.lengths)) / TOKENS
    assert drafted < 1.03
    assert machine.time_a_token < 1.03 * plain.time_a_token or noise  # noise differs between the two
    assert machine.lengths[-1] == 0


@pytest.mark.parametrize("num_requests", [4, 16])
def test_nor_do_they_in_a_batch(num_requests: int) -> None:
    cost = lambda drafts: 1 + 0.03 * drafts  # noqa: E731 - a formula
    machine = Machine(0.0, cost, num_requests=num_requests).run(TOKENS)
    assert machine.time_a_token < 1.03


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("draft_seconds", [0.0, 0.25])
@pytest.mark.parametrize("accepted", [0.7, 0.9, 0.97])
def test_where_they_do_it_is_near_the_best_fixed_number(
    cost: str, accepted: float, draft_seconds: float
) -> None:
    def time(fixed: int | None) -> float:
        runs = [Machine(accepted, COSTS[cost], draft_seconds=draft_seconds, seed=i) for i in range(3)]
        return sum(run.run(TOKENS, fixed).time_a_token for run in runs) / len(runs)

    best = min(time(fixed) for fixed in (0, 1, 2, 4, 6, 9, 12, 16))
    assert time(None) < (1.06 if accepted >= 0.9 and not draft_seconds else 1.2) * best


def test_an_answer_that_starts_to_copy_is_noticed() -> None:
    machine = Machine(lambda position: 0.95 if position > TOKENS else 0.05, COSTS["dear rows"])
    machine.run(TOKENS)
    before = machine.time
    machine.run(TOKENS)
    assert machine.time - before < 0.6 * TOKENS


def test_and_one_that_stops_to() -> None:
    machine = Machine(lambda position: 0.0 if position > TOKENS else 0.95, COSTS["dear rows"])
    machine.run(TOKENS)
    before = machine.time
    machine.run(TOKENS)
    assert machine.time - before < 1.04 * TOKENS


def test_each_request_by_its_own_record() -> None:
    good, bad = (a_request(name=name) for name in ("good", "bad"))
    machine = Machine(lambda position: 0.95, COSTS["cheap rows"])
    machine.requests = [good, bad]
    drafted = {good: 0, bad: 0}
    for _ in range(100):
        machine.speculation.propose(machine.requests, 1000)
        drafts = {request: len(request.drafts) for request in machine.requests}
        for request, count in drafts.items():
            drafted[request] += count
            if count:
                machine.speculation.verified(request, count, count if request is good else 0)
        total = sum(drafts.values())
        machine.speculation.stepped(2 + total, total, COSTS["cheap rows"](total))
    assert drafted[good] > 10 * drafted[bad] > 0


def test_a_full_batch_drafts_less_for_each() -> None:
    """Rows of a step that is bound by arithmetic cost what they are worth at most."""
    alone = Machine(0.8, lambda drafts: 1 + 0.1 * drafts).run(300)
    batch = Machine(0.8, lambda drafts: 1 + 0.1 * drafts, num_requests=8).run(300)
    assert sum(alone.lengths) / alone.made > 3 * sum(batch.lengths) / batch.made


def test_why_says_what_is_the_matter() -> None:
    machine = Machine(0.0, COSTS["dear rows"])
    machine.run(1)
    assert machine.speculation.stats().why == "steps without drafts are being measured"
    machine.run(200)
    why = machine.speculation.stats().why
    assert why.startswith("a draft is right ")
    assert why.endswith("times as long")
    assert Machine(1.0, COSTS["cheap rows"]).run(60).speculation.stats().why == ""


# The plan alone

RATES = st.floats(0.0, 1.0)


@settings(max_examples=60)
@given(
    offers=st.lists(st.tuples(st.integers(0, 3), RATES, RATES), min_size=1, max_size=3),
    extra=st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9),
    budget=st.integers(0, 9),
)
def test_no_other_choice_is_faster(
    offers: list[tuple[int, float, float]], extra: list[float], budget: int
) -> None:
    """Against all choices there are, on any stairs of costs."""
    requests = [a_request(name=str(i)) for i in range(len(offers))]
    given_ = [
        Offer(r, limit, first, later) for r, (limit, first, later) in zip(requests, offers, strict=True)
    ]
    prices = list(itertools.accumulate([1.0, *extra]))
    sequences = len(offers)

    def speed(counts: tuple[int, ...]) -> float:
        tokens = sequences + sum(
            sum(offer.first * offer.later**i for i in range(count))
            for offer, count in zip(given_, counts, strict=True)
        )
        return tokens / prices[sum(counts)]

    plan = best_plan(given_, sequences, budget, lambda rows: prices[rows - sequences])
    every = itertools.product(*(range(limit + 1) for limit, _, _ in offers))
    best = max(speed(counts) for counts in every if sum(counts) <= budget)
    chosen = tuple(plan.counts.get(request, 0) for request in requests)
    assert sum(chosen) <= budget
    assert speed(chosen) == pytest.approx(best)
    assert plan.speedup == pytest.approx(best / speed((0,) * sequences))
