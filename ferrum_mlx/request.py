"""A request as the scheduler sees it: known tokens, and how many of them have their KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ferrum_mlx.sampling import SamplingParams


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Every request wants num_computed_tokens to catch up with its known tokens; there are no phases."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, or what the context leaves
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    cache_id: int | None = None
    state: RequestState = RequestState.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known ids of positions start … end - 1."""
        split = len(self.prompt)
        return tuple(self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)])
