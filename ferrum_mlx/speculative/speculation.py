"""Speculation: a proposer, how much of it pays, and the numbers of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from ferrum_mlx.errors import one_line
from ferrum_mlx.metrics import SpeculationStats
from ferrum_mlx.request import Request
from ferrum_mlx.speculative.length import DraftLength, Limits
from ferrum_mlx.speculative.proposer import Proposer


class Speculation:
    """What an engine calls around each step; its own verify decides which guesses come true.

    A proposer that raises is left out from then on, and a note says so: no request suffers.

    Args:
        name: of the proposer, as users know it.
        max_drafts: most drafts of a request in a step.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        name: str,
        max_drafts: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._proposer, self.name, self._max_drafts, self._clock = proposer, name, max_drafts, clock
        self._length = DraftLength()
        self._failure = ""
        self._notes: list[str] = []
        self._drafted = self._accepted = self._verifies = 0
        self._seconds = 0.0

    def propose(self, requests: Sequence[Request], budget: int) -> None:
        """Set the drafts of every running request that decodes, before the step is scheduled.

        Args:
            requests: all of them; each one's last token is known.
            budget: rows that the step's token budget leaves for drafts in all.
        """
        for request in requests:
            request.drafts = []
        if not requests or self._failure:
            return
        start = self._clock()
        with self._guarded():
            self._propose(requests, budget, start)
        self._seconds += self._clock() - start

    def wants(self, requests: Sequence[Request]) -> bool:
        """Whether the next step is likely to get drafts, so that the one in flight had better be waited for.

        Args:
            requests: those that decode, the tokens in flight of some of them not known yet.
        """
        if not requests or self._failure:
            return False
        with self._guarded():
            limits, _ = self._limits(requests)
            budget = max(self._max_drafts, 2 * len(requests))  # what pays at all pays within that
            return self._length.would_choose(limits, len(requests), budget, cheap=self._proposer.cheap)
        return False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A second model fails in as many ways as the first."""
        try:
            yield
        except Exception as error:
            self._failure = f"the proposer failed: {one_line(error)}"
            self._notes.append(f"runs without speculation from now on: {self._failure}")

    def _propose(self, requests: Sequence[Request], budget: int, start: float) -> None:
        limits, guesses = self._limits(requests)
        cheap = self._proposer.cheap
        counts = self._length.choose(limits, len(requests), budget, cheap=cheap)
        if counts and not cheap:
            guesses = self._proposer.propose(counts)
            self._length.drafted(self._clock() - start, max(map(len, guesses.values()), default=0))
        for request, count in counts.items():
            request.drafts = guesses.get(request, [])[:count]

    def _limits(self, requests: Sequence[Request]) -> tuple[Limits, dict[Request, list[int]]]:
        """What each request could be given at most; and from a cheap proposer, all of that."""
        proposer = self._proposer
        most = {request: limit for request in requests if (limit := self._most(request)) > 0}
        if not proposer.cheap:
            return {request: (limit, proposer.trust(request)) for request, limit in most.items()}, {}
        guesses = proposer.propose(most)
        limits = {request: (len(guess), proposer.trust(request)) for request, guess in guesses.items()}
        return limits, guesses

    def _most(self, request: Request) -> int:
        """The step itself brings one token more than it has drafts."""
        output = len(request.output) + request.in_flight
        return min(self._max_drafts, request.max_tokens - output - 1)

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """After each verify of the drafts that `propose` set: how many were verified, and came true."""
        self._drafted += drafted
        self._accepted += accepted
        self._verifies += 1
        self._length.verified(request, drafted, accepted)

    def stepped(self, rows: int, drafts: int, seconds: float) -> None:
        """After each forward: all its rows, how many of them were drafts, and how long it took."""
        self._length.stepped(rows, drafts, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended, or was preempted; idempotent."""
        self._length.forget(request)
        with self._guarded():
            self._proposer.forget(request)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            name=self.name,
            drafted=self._drafted,
            accepted=self._accepted,
            verifies=self._verifies,
            draft_seconds=self._seconds,
            why=self._failure or self._length.why,
        )

    def take_notes(self) -> list[str]:
        """What a user must be told since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        self._proposer.close()
