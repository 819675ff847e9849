"""Requests, and a machine that is simulated: what a step costs, which guesses come true."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.proposer import Proposer
from ferrum_mlx.speculative.speculation import Speculation

FAR = 10**6


def a_request(prompt: Sequence[int] = (1,), *, name: str = "r", max_tokens: int = FAR, **params) -> Request:
    return Request(name, list(prompt), SamplingParams(**params), 7, max_tokens, output=[0])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guesser(Proposer):
    """As many guesses as are wanted, each round of them `seconds` long; forgets are counted."""

    def __init__(self, clock: Clock, seconds: float = 0.0, trust: int = 1) -> None:
        self.clock, self.seconds, self._trust = clock, seconds, trust
        self.cheap = not seconds
        self.asked: list[Mapping[Request, int]] = []

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        self.asked.append(wanted)
        self.clock.now += self.seconds * max(wanted.values(), default=0)
        return {request: [0] * count for request, count in wanted.items()}

    def trust(self, request: Request) -> int:
        return self._trust


class Machine:
    """Steps of `num_requests` streams; `cost(drafts)` in steps without drafts.

    Attributes:
        time: of all steps and guesses so far.
        made: output tokens so far.
        lengths: drafts of each step.
    """

    def __init__(
        self,
        accepted: float | Callable[[int], float],
        cost: Callable[[int], float],
        *,
        num_requests: int = 1,
        draft_seconds: float = 0.0,
        noise: float = 0.0,
        seed: int = 1,
        max_drafts: int = 16,
    ) -> None:
        self._rng, self._clock = random.Random(seed), Clock()
        self._accepted, self._cost, self._noise = accepted, cost, noise
        self.guesser = Guesser(self._clock, draft_seconds)
        self.speculation = Speculation(self.guesser, name="x", max_drafts=max_drafts, clock=self._clock)
        self.requests = [a_request(name=str(i)) for i in range(num_requests)]
        self.made, self.lengths = 0, list[int]()

    @property
    def time(self) -> float:
        return self._clock.now

    @property
    def time_a_token(self) -> float:
        """Of each stream, in steps without drafts."""
        return self.time / self.made * len(self.requests)

    def run(self, tokens: int, fixed: int | None = None) -> Machine:
        """Until each stream has that many tokens on average; `fixed` drafts instead of the speculation's."""
        until = self.made + tokens * len(self.requests)
        while self.made < until:
            self._step(fixed)
        return self

    def _step(self, fixed: int | None) -> None:
        if fixed is None:
            self.speculation.propose(self.requests, FAR)
        else:
            for request, guesses in self.guesser.propose(dict.fromkeys(self.requests, fixed)).items():
                request.drafts = guesses
        drafts = sum(len(request.drafts) for request in self.requests)
        self.lengths.append(drafts)
        seconds = self._cost(drafts)
        if self._rng.random() < 0.15:  # something else wants the machine
            seconds *= 1 + self._noise * self._rng.random()
        self._clock.now += seconds
        for request in self.requests:
            right = self._right(len(request.drafts), len(request.output))
            if request.drafts and fixed is None:
                self.speculation.verified(request, len(request.drafts), right)
            request.output += [0] * (right + 1)
            self.made += right + 1
        if fixed is None:
            self.speculation.stepped(len(self.requests) + drafts, drafts, seconds)

    def _right(self, drafts: int, position: int) -> int:
        chance = self._accepted if isinstance(self._accepted, float) else self._accepted(position)
        return next((i for i in range(drafts) if self._rng.random() >= chance), drafts)
