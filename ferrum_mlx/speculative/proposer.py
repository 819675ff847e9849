"""What a proposer is: it guesses tokens, and nothing else. Whether they are right is the verify's matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ferrum_mlx.request import Request


class Proposer(Protocol):
    """One for all requests of an engine; called from its thread, between two steps.

    Attributes:
        cheap: more guesses than are used cost next to nothing, so ask for as many as could be used.
    """

    cheap: bool = False

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Guesses for the next output tokens of decoding requests, whose tokens are all known.

        At most the wanted number each; fewer, or a request left out, is an answer too.
        """
        ...

    def trust(self, request: Request) -> int:
        """How strong the evidence for the guesses is, from 0 on to 3: those of equal trust fare alike."""
        return 0

    def forget(self, request: Request) -> None:
        """The request has ended, or was preempted; idempotent."""
        return

    def close(self) -> None:
        """Free everything; no call follows."""
        return
