"""What a system under test is: this engine, and whoever it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ferrum_mlx.bench.trace import Trace
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.errors import FerrumError


class PeerAbsentError(FerrumError):
    """A peer that isn't here, or cannot run here: why, in words."""


class System(Protocol):
    """One that answers requests in this process, or on this machine.

    Attributes:
        name: in the table.
        same_weights: greedy ids must be ours, but for near-ties.
    """

    @property
    def name(self) -> str: ...

    @property
    def same_weights(self) -> bool: ...

    def method(self, case: Case) -> str:
        """Which of its ways is measured, in words; "" if there is one alone."""
        ...

    def refusal(self, case: Case) -> str:
        """Why it cannot run a case; "" where it can."""
        ...

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        """Serve the requests as they fall due; times are perf_counter's.

        Raises:
            Exception: of whatever kind the system raises.
        """
        ...

    def close(self) -> None: ...
