"""How likely a draft is accepted, from the drafts before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrum_mlx.request import Request

OWN_MEMORY, SHARED_MEMORY = 0.95, 0.995  # kept of what was counted, at each further trial
PRIOR = 4  # trials that what is assumed beforehand counts as
# Assumed of a first draft, and of each behind accepted ones, by the proposer's trust: what prompt lookup
# did on answers of SmolLM2-135M, to prompts of which most asked for nothing to be copied.
ASSUMED = ((0.4, 0.7), (0.75, 0.8), (0.85, 0.9), (0.95, 0.95))


@dataclass(slots=True)
class _Rate:
    """Hits per trial, the older ones counting less and less."""

    memory: float
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hit: bool) -> None:
        self.hits = self.hits * self.memory + hit
        self.trials = self.trials * self.memory + 1

    def value(self, assumed: float) -> float:
        return (self.hits + PRIOR * assumed) / (self.trials + PRIOR)


@dataclass(slots=True)
class _Rates:
    """Of the first draft, and of each later one if all before it were accepted."""

    first: _Rate
    later: _Rate

    @classmethod
    def fresh(cls, memory: float) -> _Rates:
        return cls(_Rate(memory), _Rate(memory))

    def add(self, drafted: int, accepted: int) -> None:
        for position in range(min(accepted + 1, drafted)):
            rate = self.later if position else self.first
            rate.add(position < accepted)


@dataclass(slots=True)
class Acceptance:
    """A request's own record, on top of that of all requests, by the proposer's trust in its guesses."""

    _shared: dict[int, _Rates] = field(default_factory=dict)
    _own: dict[Request, dict[int, _Rates]] = field(default_factory=dict)

    def rates(self, request: Request, trust: int) -> tuple[float, float]:
        """Of the first draft, and of each later one behind accepted ones."""
        assumed = ASSUMED[min(trust, len(ASSUMED) - 1)]
        for known in (self._shared.get(trust), self._own.get(request, {}).get(trust)):
            if known is not None:
                assumed = known.first.value(assumed[0]), known.later.value(assumed[1])
        return assumed

    def add(self, request: Request, trust: int, drafted: int, accepted: int) -> None:
        self._shared.setdefault(trust, _Rates.fresh(SHARED_MEMORY)).add(drafted, accepted)
        own = self._own.setdefault(request, {})
        own.setdefault(trust, _Rates.fresh(OWN_MEMORY)).add(drafted, accepted)

    def forget(self, request: Request) -> None:
        self._own.pop(request, None)
