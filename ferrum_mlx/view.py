"""An engine at one moment, for people to look at. Plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass

from ferrum_mlx.metrics import KVMap, Latencies

VIEWED_REQUESTS = 64  # of a view; the others are counted
NO_GAPS = Latencies()
VIEWED_GAPS = 512  # between tokens, the latest of all running requests together


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request that has not ended.

    Attributes:
        state: "waiting", "prefill", "decode" or "preempted".
        computed_tokens: of the prompt and the output so far, those whose KV is there.
        cached_tokens: of the prompt, found in the prefix cache.
        age_s: seconds since it arrived.
        ttft_s: 0.0 before the first token.
        tokens_per_second: of the output behind the first token, or till then of its prefill; 0.0 if waiting.
    """

    request_id: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    age_s: float
    ttft_s: float
    tokens_per_second: float
    preemptions: int

    @property
    def prefill_share(self) -> float:
        """How much of what it must compute before its next token is there, 0 to 1."""
        known = self.prompt_tokens + self.output_tokens
        return min(1.0, self.computed_tokens / known) if known else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What an engine holds between two steps.

    Attributes:
        requests: VIEWED_REQUESTS at most, in the order of their turn, running ones first.
        more_requests: how many there are besides.
        itl: the latest gaps between tokens of the requests viewed.
        memory_bytes, peak_memory_bytes: held by the backend's arrays, weights and pools included.
    """

    kv: KVMap
    requests: tuple[RequestView, ...] = ()
    more_requests: int = 0
    itl: Latencies = NO_GAPS
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
