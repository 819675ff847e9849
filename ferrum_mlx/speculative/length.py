"""How many drafts each request gets: those that make the batch as a whole faster, and at times a probe.

A draft is worth the probability that it is accepted, and costs what its row makes the step longer
(and, with a draft model, its own step). The best drafts of all requests are taken as long as tokens per
second grow. Two accounts, in steps without drafts, keep speculation from costing more than it gives when
an estimate is wrong: the further the balance of what plans have brought is below zero, the more a plan
must promise; and probes, drafts that are expected to lose, which alone can find out that guesses have
become good, are paid from an allowance. Both grow by a fixed share of the steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ferrum_mlx.request import Request
from ferrum_mlx.speculative.acceptance import Acceptance
from ferrum_mlx.speculative.cost import WINDOW, StepCost, typical

WORTHWHILE = 1.03  # times as fast as a step without drafts, to be worth the trouble
SHARE = 0.005  # of each step, paid into both accounts
START, MOST = 1.0, 6.0  # of the balance, in steps
MOST_ALLOWED = 2.0
DISTRUST = 1.0  # what a plan must promise more, a step that the balance is below zero
PROBE = 2  # drafts of a probe
LEAST_LOSS = 0.1  # of a step, that a probe is taken to cost: a measurement may say nothing
DRAFT = 0.25  # of a step: what a draft model's own step is taken to cost until that is known


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request could be given: at most `limit` drafts, taken to be accepted at these rates."""

    request: Request
    limit: int
    first: float
    later: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`speedup` in tokens a second, over a step without drafts."""

    counts: Mapping[Request, int]
    speedup: float


def best_plan(
    offers: Sequence[Offer],
    sequences: int,
    budget: int,
    seconds: Callable[[int], float],
    draft_seconds: float = 0.0,
) -> Plan:
    """The drafts that bring most tokens a second.

    Args:
        sequences: rows of a step without drafts.
        budget: most drafts in all.
        seconds: of a step with that many rows.
        draft_seconds: of making one draft for each request.
    """
    worth = [(o.first * o.later**i, i + 1, o.request) for o in offers for i in range(o.limit)]
    worth = sorted(worth, key=lambda draft: -draft[0])[:budget]
    plain = sequences / seconds(sequences)
    most = sequences + sum(value for value, _, _ in worth)
    tokens, longest, best, best_at = float(sequences), 0, 1.0, 0
    for taken, (value, length, _) in enumerate(worth, 1):
        tokens += value
        longest = max(longest, length)
        cost = (seconds(sequences + taken) + draft_seconds * longest) * plain
        if tokens > best * cost:
            best, best_at = tokens / cost, taken
        elif most < best * cost:  # nor can any further draft, since cost only rises
            break
    return Plan(Counter(request for _, _, request in worth[:best_at]), best)


@dataclass(frozen=True, slots=True)
class _Choice:
    """`why` it is to draft nothing; `draft_seconds` is what making the drafts is taken to cost."""

    counts: Mapping[Request, int] = field(default_factory=dict)
    why: str = ""
    is_probe: bool = False
    draft_seconds: float = 0.0


Limits = Mapping[Request, tuple[int, int]]  # the most drafts, and the proposer's trust in them


class DraftLength:
    """Learns from every verify and every step.

    Attributes:
        why: why the latest choice was to draft nothing; "" if it was not.
    """

    def __init__(self) -> None:
        self.why = ""
        self._costs: dict[int, StepCost] = {}  # by the number of sequences
        self._acceptance = Acceptance()
        self._balance, self._allowance = START, 0.0
        self._sequences = 1  # of the latest question
        self._is_probe = False
        self._trusts: dict[Request, int] = {}  # in the drafts of the latest choice
        self._turns: dict[Request, int] = {}  # the choice at which a request was given drafts last
        self._choices = 0
        self._spent, self._gained = 0.0, 0  # by the latest choice: seconds on drafts, tokens accepted
        self._draft_seconds: deque[float] = deque(maxlen=WINDOW)

    def choose(self, limits: Limits, sequences: int, budget: int, *, cheap: bool) -> Mapping[Request, int]:
        """How many drafts each request gets; those left out get none.

        Args:
            sequences: requests that decode in the coming step, drafts or not.
            budget: most drafts in all.
            cheap: the drafts cost nothing but their rows.
        """
        choice = self._decide(limits, sequences, budget, cheap)
        self._sequences, self._is_probe, self.why = sequences, choice.is_probe, choice.why
        self._spent, self._gained = choice.draft_seconds, 0
        self._choices += 1
        self._trusts = {request: limits[request][1] for request in choice.counts}
        self._turns.update(dict.fromkeys(choice.counts, self._choices))
        return choice.counts

    def would_choose(self, limits: Limits, sequences: int, budget: int, *, cheap: bool) -> bool:
        """Whether `choose` would give anyone drafts."""
        choice = self._decide(limits, sequences, budget, cheap)
        self._sequences = sequences
        self.why = choice.why if choice.why else self.why
        return bool(choice.counts)

    def drafted(self, seconds: float, longest: int) -> None:
        """A draft model took `seconds` for what was chosen, its longest guess that long."""
        if self._is_probe:  # it may have had to catch up, which no plan counts
            self._spent = seconds
        if longest:
            self._draft_seconds.append(seconds / longest)

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Of the drafts chosen last; before `stepped`."""
        self._acceptance.add(request, self._trusts.get(request, 0), drafted, accepted)
        self._gained += accepted

    def stepped(self, rows: int, drafts: int, seconds: float) -> None:
        cost = self._costs.setdefault(self._sequences, StepCost(self._sequences))
        if rows == self._sequences + drafts:  # else rows of prompts are among them, which cost less
            cost.add(rows, seconds)
        longer = (cost.seconds(self._sequences + drafts) + self._spent) / cost.plain - 1
        if self._is_probe:
            longer = max(longer, LEAST_LOSS)
        self._settle(self._gained / self._sequences - longer)
        self._spent, self._gained = 0.0, 0

    def _settle(self, saved: float) -> None:
        """Book the steps that the latest drafts have saved, or cost."""
        if self._is_probe:
            self._allowance += saved
        if not self._is_probe or saved > 0:
            self._balance += saved
        self._balance = min(MOST, self._balance + SHARE)
        self._allowance = min(MOST_ALLOWED, self._allowance + SHARE)

    def forget(self, request: Request) -> None:
        self._acceptance.forget(request)
        self._trusts.pop(request, None)
        self._turns.pop(request, None)

    def _decide(self, limits: Limits, sequences: int, budget: int, cheap: bool) -> _Choice:
        cost = self._costs.get(sequences) or StepCost(sequences)
        offers = [
            Offer(request, limit, *self._acceptance.rates(request, trust))
            for request, (limit, trust) in limits.items()
            if limit > 0
        ]
        if not limits:  # nobody may have more than the step brings anyway
            return _Choice(why=self.why)
        if not offers:
            return _Choice(why="there is nothing to guess from")
        if budget < 1:
            return _Choice(why="the step has no room for drafts")
        if cost.needs_plain:
            return _Choice(why="steps without drafts are being measured")
        draft_seconds = 0.0 if cheap else self._seconds_a_draft(cost)
        plan = best_plan(offers, sequences, budget, cost.seconds, draft_seconds)
        if plan.speedup >= WORTHWHILE + DISTRUST * max(0.0, -self._balance):
            return _Choice(plan.counts, draft_seconds=draft_seconds * max(plan.counts.values()))
        return self._probe(offers, cost, budget, draft_seconds)

    def _probe(self, offers: Sequence[Offer], cost: StepCost, budget: int, draft_seconds: float) -> _Choice:
        """Drafts for the request that has had none for longest, if they can be paid."""
        offer = min(offers, key=lambda o: self._turns.get(o.request, 0))
        count = min(PROBE, offer.limit, budget)
        longer = (cost.seconds(cost.sequences + count) + draft_seconds * count) / cost.plain
        if self._allowance >= min(max(longer - 1, LEAST_LOSS), MOST_ALLOWED):
            return _Choice({offer.request: count}, is_probe=True, draft_seconds=draft_seconds * count)
        right = f"a draft is right {max(o.first for o in offers):.0%} of the time"
        return _Choice(why=f"{right}, and a step with {count} takes {longer:.1f} times as long")

    def _seconds_a_draft(self, cost: StepCost) -> float:
        return typical(self._draft_seconds) if self._draft_seconds else DRAFT * cost.plain
