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
    """Blocks of the KV pools; a group's pool is counted in its own blocks, then summed.

    Attributes:
        used_blocks: in use by at least one request.
        shared_blocks: of those, in use by more than one.
        cached_blocks: in use by none, but findable by a prompt with the same tokens; free for anyone.
    """

    block_size: int
    total_blocks: int
    used_blocks: int
    shared_blocks: int = 0
    cached_blocks: int = 0

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


FREE, CACHED = 0, -1  # states of a block in a KVMap; above 0, how many requests use it


@dataclass(frozen=True, slots=True)
class KVMap:
    """Every block of every KV group's pool: FREE, CACHED, or how many requests use it."""

    groups: tuple[str, ...]  # "full", "window 512", "state"
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CacheMetrics:
    """The prefix cache since the engine started; a hit or a miss is one admission of a prompt."""

    enabled: bool
    block_size: int
    kv_dtype: str
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    saved_prefill_tokens: int = 0
    entries: int = 0  # blocks that a prompt can find now, in use or not
    bytes: int = 0  # of those

    @property
    def hit_rate(self) -> float:
        return self.hits / total if (total := self.hits + self.misses) else 0.0


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
