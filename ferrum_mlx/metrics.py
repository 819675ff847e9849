"""Numbers shown to people: usage, timings, the KV pool, a step. Plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; replays after a preemption are not counted again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, in seconds and tokens per second; 0.0 where nothing was measured.

    ttft_s runs from the request's arrival to its first token; prefill_tps is prompt tokens not
    cached over the time from the start of prefill to the first token; decode_tps is the tokens
    after the first over the time from the first token to the last.
    """

    ttft_s: float
    prefill_tps: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks of the KV pools; a group's pool is counted in its own blocks, then summed."""

    block_size: int
    total_blocks: int
    used_blocks: int

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step."""

    step: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    preemptions: int
    kv: KVUsage
