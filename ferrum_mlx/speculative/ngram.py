"""Prompt lookup: what followed the last tokens when they stood in the prompt or the output before.

Every pair of neighbouring tokens links to where it stood before, so a step costs what is new, and the
few earlier places that are compared. Of those the longest match counts, and the latest of equal ones:
a rewrite of a text repeats its own changes. (vLLM's and transformers' proposers search the whole context
each step, and take the earliest of equal matches.)
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from ferrum_mlx.request import Request
from ferrum_mlx.speculative.proposer import Proposer

SHORTEST, LONGEST = 2, 16  # tokens of a match: fewer say nothing, more change nothing
PLACES = 32  # earlier places of a pair that are compared, from the latest on


class History:
    """One request's tokens, each linked to where the pair that it ends stood before.

    Attributes:
        matched: tokens of the best earlier match of the end; below SHORTEST without one.
    """

    def __init__(self) -> None:
        self.matched = 0
        self._place = 0  # where that match ends
        self._tokens = array("q")
        self._earlier = array("q")
        self._latest: dict[tuple[int, int], int] = {}

    def catch_up(self, request: Request) -> None:
        tokens = self._tokens
        known, total = len(tokens), len(request.prompt) + len(request.output)
        for token in request.tokens(known, total):
            tokens.append(token)
            end = len(tokens) - 1
            pair = (tokens[end - 1], token) if end else (-1, token)
            self._earlier.append(self._latest.get(pair, -1))
            self._latest[pair] = end
        if known < total:
            self._match()

    def continuation(self, count: int) -> list[int]:
        """What stood behind the match, and behind that the same again; [] without a match."""
        if self.matched < SHORTEST:
            return []
        tokens, after = self._tokens, self._place + 1
        period = len(tokens) - after
        return [tokens[after + i % period] for i in range(count)]

    def _match(self) -> None:
        self.matched, place = SHORTEST - 1, self._earlier[-1]
        for _ in range(PLACES):
            if place < 0 or self.matched >= LONGEST:
                break
            if (length := self._common(place)) > self.matched:
                self._place, self.matched = place, length
            place = self._earlier[place]

    def _common(self, place: int) -> int:
        """How many tokens up to `place` are those at the end, at most LONGEST."""
        tokens, end = self._tokens, len(self._tokens) - 1
        most = min(LONGEST, place + 1)
        return next((i for i in range(most) if tokens[place - i] != tokens[end - i]), most)


class NgramProposer(Proposer):
    cheap = True

    def __init__(self) -> None:
        self._histories: dict[Request, History] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        guesses = {}
        for request, count in wanted.items():
            history = self._histories.setdefault(request, History())
            history.catch_up(request)
            guesses[request] = history.continuation(count)
        return guesses

    def trust(self, request: Request) -> int:
        """0 for a match of 2 tokens, 1 up to 4, 2 up to 8, 3 above."""
        return max(0, (self._histories[request].matched - 1).bit_length() - 1)

    def forget(self, request: Request) -> None:
        self._histories.pop(request, None)

    def close(self) -> None:
        self._histories.clear()
