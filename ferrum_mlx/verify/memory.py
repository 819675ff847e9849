"""Whether a step writes its pools in place: a copied one shows in the peak memory of a decode step."""

from __future__ import annotations

from collections.abc import Callable

from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.messages import Event, Failed, Stepped, Submit
from ferrum_mlx.verify.compare import FAULT, IN_PLACE, NOT_APPLICABLE, REFUSED, Row, Skipped
from ferrum_mlx.verify.runs import Subject, engine_over


def check_pools(subject: Subject, request: Submit) -> Row:
    """The peak of every decode step of the request stays below the size of the smallest pool.

    Raises:
        Skipped: no write of this backend can copy a pool, or the pools are too small to tell.
        FerrumError: the request failed.
    """
    executor = subject.executor
    size = executor.memory().smallest_pool_bytes
    if not size:
        raise Skipped(NOT_APPLICABLE, "this backend's writes are in place by construction")
    own = _growth(executor, lambda: executor.forward([0]))
    if own * 2 >= size:
        why = f"a pool of {_size(size)} cannot be told from the {_size(own)} that a forward takes anyway"
        raise Skipped(REFUSED, f"{why}; raise --max-model-len")
    largest = _decode_growth(subject, request)
    detail = f"a decode step's peak grows by {_size(largest)}; the smallest pool has {_size(size)}"
    return Row(outcome=FAULT if largest >= size else IN_PLACE, detail=detail)


def _decode_growth(subject: Subject, request: Submit) -> int:
    """The largest of any step that only decodes, in bytes."""
    engine = engine_over(subject, subject.executor, subject.config)
    engine.submit(request)
    largest = 0
    events: list[Event] = []
    while engine.has_work():
        growth = _growth(subject.executor, lambda: events.extend(engine.step()))
        while events:
            event = events.pop()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Stepped) and event.stats.decode_tokens and not event.stats.prefill_tokens:
                largest = max(largest, growth)
    return largest


def _growth(executor: ModelExecutor, work: Callable[[], object]) -> int:
    """Bytes by which the peak rises above what was held before."""
    executor.reset_peak_memory()
    held = executor.status().memory_bytes
    work()
    return executor.status().peak_memory_bytes - held


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
