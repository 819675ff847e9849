"""Numbers shown to people: usage, timings, the KV pool, a step, a request. Plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass, field

# Upper ends of the buckets that gaps between tokens are counted in, in seconds; above the last is one more.
ITL_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The gaps between a request's tokens (ITL), in seconds; percentiles by nearest rank.

    A gap is measured where the tokens are: what a preemption or a neighbour's prefill costs is in it.

    Attributes:
        buckets: gaps up to each of ITL_BOUNDS and above the one before; last, those above all.
    """

    count: int = 0
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(ITL_BOUNDS) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """Drafts that were verified, those of them that were right, and how often a request had some verified."""

    drafted: int = 0
    accepted: int = 0
    verifies: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verify brings, the target's own included."""
        return 1 + (self.accepted / self.verifies if self.verifies else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One request from arrival to end. Times are seconds, 0.0 where it did not get that far.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        arrived: seconds since the epoch.
        queue_s: arrival to the first step that has a part of it.
        prefill_s: from there to the first token.
        decode_s: first token to last.
        e2e_s: arrival to end.
        preemptions: how often it had to make room.
        replayed_tokens: tokens computed again because of that; no part of `usage`.
        drafted_tokens, accepted_tokens: guesses that were verified, and those of them that were right.
        verifies: steps in which some were.
        adapter: the LoRA adapter it went through; "" is none.
    """

    request_id: str
    priority: int
    finish_reason: str
    arrived: float
    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float
    usage: Usage
    timings: Timings
    itl: Latencies
    preemptions: int
    replayed_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifies: int = 0
    adapter: str = ""

    @property
    def guesses(self) -> Guesses:
        return Guesses(drafted=self.drafted_tokens, accepted=self.accepted_tokens, verifies=self.verifies)


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


NO_CACHE = CacheMetrics(enabled=False, block_size=0, kv_dtype="")


@dataclass(frozen=True, slots=True)
class LoraMetrics:
    """The LoRA adapters of an engine: `active` is how many admitted requests go through each, by name."""

    enabled: bool = False
    adapter_count: int = 0
    active: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats(Guesses):
    """Speculative decoding since the engine started.

    Attributes:
        name: of the proposer.
        draft_seconds: spent on guessing.
        why: why nothing is guessed just now; "" if something is.
    """

    name: str
    draft_seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One engine step, and where the engine stands after it.

    Attributes:
        seconds: of the whole step; schedule_s, forward_s and commit_s are its parts.
        prefill_tokens: computed in the step that has landed; a replay is prefill.
        decode_tokens: output tokens that its decodes have brought, accepted drafts among them.
        admitted_tokens: tokens of the prompts that were admitted for the first time in this step.
        cached_tokens: of those, found in the prefix cache.
        waiting: requests not running; `preempted` of them have run before.
        preemptions: since the engine started.
        speculation: None where it is off.
    """

    step: int = 0
    seconds: float = 0.0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    commit_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    preemptions: int = 0
    kv: KVUsage
    cache: CacheMetrics = NO_CACHE
    lora: LoraMetrics = field(default_factory=LoraMetrics)
    speculation: SpeculationStats | None = None
