"""A scheduler over the fake executor, whose plans are carried out."""

from __future__ import annotations

from collections.abc import Callable

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.batch import UnifiedBatch, UnifiedItem
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.request import Request, RequestState
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.scheduler import Scheduled, Scheduler


class Bench:
    """A scheduler whose plans are carried out, one token sampled where a plan catches up."""

    def __init__(self, blocks: int = 100, **settings: int) -> None:
        config = EngineConfig(block_size=4, max_model_len=200, kv_memory=blocks * 16, **settings)
        self.executor = FakeExecutor(config)
        self.scheduler = Scheduler(self.executor, config)
        self.added = 0

    def add(self, name: str, prompt: int | list[int], priority: int = 0) -> Request:
        """A prompt of that many tokens, unlike any other's."""
        self.added += 1
        ids = [self.added] * prompt if isinstance(prompt, int) else prompt
        request = Request(name, ids, SamplingParams(), seed=0, max_tokens=100, priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        plan = self.scheduler.schedule()
        if plan:
            self.executor.unified_decode(UnifiedBatch(tuple(_item(s) for s in plan)))
        for scheduled in plan:
            request = scheduled.request
            request.advance(scheduled.num_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.output.append(7)
        return {scheduled.request.request_id: scheduled.num_tokens for scheduled in plan}

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(300):
            if done():
                return
            self.step()
        raise AssertionError("it never came to that")


def _item(scheduled: Scheduled) -> UnifiedItem:
    request, start = scheduled.request, scheduled.request.num_computed_tokens
    assert request.cache_id is not None
    return UnifiedItem(
        cache_id=request.cache_id,
        q_tokens=request.tokens(start, start + scheduled.num_tokens),
        pos_offset=start,
        is_final_chunk=start + scheduled.num_tokens == request.num_tokens,
    )


RUNNING, PREEMPTED, WAITING = RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING
