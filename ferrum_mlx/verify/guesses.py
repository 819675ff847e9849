"""A speculation without a policy: it drafts whatever a function says, whatever that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ferrum_mlx.request import Request
from ferrum_mlx.speculative.proposer import Proposer
from ferrum_mlx.speculative.speculation import Speculation

Guess = Callable[[Request, int], Sequence[int]]
MOST = 8  # drafts of a request in a step


class _Guesser(Proposer):
    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: list(self._guess(request, count))[:count] for request, count in wanted.items()}


class Guesses(Speculation):
    """`guess` gets a request and the most drafts it may have."""

    def __init__(self, guess: Guess) -> None:
        self._guesser = _Guesser(guess)
        super().__init__(self._guesser, name="given", max_drafts=MOST)

    def wants(self, requests: Sequence[Request]) -> bool:
        return bool(requests)

    def propose(self, requests: Sequence[Request], budget: int) -> None:
        for request in requests:
            room = min(MOST, budget, request.max_tokens - len(request.output) - 1)
            request.drafts = self._guesser.propose({request: max(0, room)})[request]
            budget -= len(request.drafts)

    def stepped(self, rows: int, drafts: int, seconds: float) -> None:
        """There is nothing to learn from it."""


def spoiled(answers: Mapping[str, Sequence[int]], vocab_size: int, every: int = 3) -> Guess:
    """Of each request, by its id, the tokens of `answers` at its place; each `every`-th one is wrong."""

    def guess(request: Request, room: int) -> list[int]:
        done = len(request.output)
        right = answers.get(request.request_id, ())[done : done + room]
        wrong = [position % every == every - 1 for position in range(done, done + len(right))]
        return [(token + bad) % vocab_size for token, bad in zip(right, wrong, strict=True)]

    return guess
