"""An engine's readings as a test wants them, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError
from ferrum_mlx.messages import Ready
from ferrum_mlx.metrics import CACHED, FREE, KVMap, KVUsage, Latencies, SpeculationStats, StepStats
from ferrum_mlx.model_info import MemoryRequirements
from ferrum_mlx.totals import Totals
from ferrum_mlx.view import EngineView, RequestView

KV = KVMap(("full",), ((1,) * 30 + (2,) * 8 + (3,) * 2 + (CACHED,) * 20 + (FREE,) * 40,))
USAGE = KVUsage(16, 100, 40, 10, 20)
DECODING = RequestView(
    request_id="17",
    state="decode",
    prompt_tokens=6000,
    computed_tokens=6213,
    cached_tokens=4096,
    output_tokens=214,
    age_s=4.8,
    ttft_s=0.412,
    tokens_per_second=48.7,
    preemptions=0,
)
PREFILLING = replace(
    DECODING,
    request_id="18",
    state="prefill",
    prompt_tokens=3000,
    computed_tokens=1860,
    cached_tokens=0,
    output_tokens=0,
    ttft_s=0.0,
    tokens_per_second=1842.0,
)
PREEMPTED = replace(
    PREFILLING, request_id="19", state="preempted", computed_tokens=0, tokens_per_second=0.0, preemptions=1
)
ITL = Latencies(count=100, total=2.0, p50=0.0203, p99=0.0318, max=0.074)


class Client:
    """What EngineFeed asks of an EngineClient; a test sets the answers."""

    def __init__(self) -> None:
        self.config = EngineConfig(backend="fake", speculative="ngram")
        self.ready: Ready | None = ready()
        self.death: FerrumError | None = None
        self.last_step: StepStats | None = None
        self.sums = Totals()
        self.answer = EngineView(kv=KVMap(("full",), ((FREE,) * 100,)))
        self.asked = 0

    def totals(self) -> Totals:
        return self.sums

    def view(self, timeout: float = 5.0) -> EngineView:
        self.asked += 1
        if self.death is not None:
            raise self.death
        return self.answer

    def work(self, tokens: int = 12, **more: Any) -> None:
        """A step that decodes so many tokens."""
        number = self.last_step.step + 1 if self.last_step else 1
        stats: dict[str, Any] = {"running": 2, "waiting": 1, "kv": USAGE, **more}
        self.last_step = StepStats(step=number, decode_tokens=tokens, **stats)
        self.sums.add_step(self.last_step)

    def die(self) -> None:
        self.ready, self.death = None, EngineDiedError("the engine's process was killed")


def ready(**changes: Any) -> Ready:
    executor = FakeExecutor(EngineConfig(backend="fake"))
    facts: dict[str, Any] = {
        "info": replace(executor.info, model_id="Qwen3-8B"),
        "backend": "fake",
        "backend_reason": "a test",
        "max_model_len": 16_384,
        "kv": replace(USAGE, used_blocks=0, shared_blocks=0, cached_blocks=0),
        "notes": ("the context is shorter",),
        "capabilities": replace(executor.capabilities(), off=("paged kernel: no GPU [x]",)),
        "memory": MemoryRequirements(
            parameter_bytes=4_600_000_000, kv_bytes_per_token=1000, kv_pool_bytes=3_400_000_000
        ),
        "memory_limit_bytes": 10_000_000_000,
        "speculation": "ngram",
    }
    return Ready(**{**facts, **changes})


def busy() -> Client:
    """An engine in the middle of things."""
    client = Client()
    guesses = SpeculationStats(name="ngram", drafted=40, accepted=26, verifies=10)
    client.work(12, admitted_tokens=6144, cached_tokens=4362, preemptions=1, speculation=guesses)
    client.sums.latest_ttft_s.extend([0.39, 1.204])
    client.answer = EngineView(
        kv=KV,
        requests=(DECODING, PREFILLING, PREEMPTED),
        more_requests=5,
        itl=ITL,
        memory_bytes=8_400_000_000,
        peak_memory_bytes=8_500_000_000,
    )
    return client
