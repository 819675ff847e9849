"""Faults of a step, a codec or a backend: who fails, and who goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.batch import ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import CapacityError, ContractError, FerrumError
from ferrum_mlx.executor import Submission
from ferrum_mlx.messages import Event, Failed, Stepped, Submit
from ferrum_mlx.sampling import SamplingParams

from .engine_driver import drain, end_of, ids_of, make, say


def test_an_exception_in_the_forward_fails_what_runs_and_not_the_engine() -> None:
    class Broken(FakeExecutor):
        broken = True

        def _launch(self, batch: UnifiedBatch):
            if self.broken:
                raise RuntimeError("the device is gone")
            return super()._launch(batch)

    config = EngineConfig(block_size=4, max_model_len=64)
    executor = Broken(config)
    engine = Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test")
    error = end_of(say(engine, "abc"), "r").error
    assert type(error) is FerrumError
    assert "RuntimeError: the device is gone" in str(error)
    executor.broken = False
    assert end_of(say(engine, "abc", max_tokens=2), "r").finish_reason == "length"


def _refusing(refuse: Callable[[UnifiedBatch, int], Submission | None], **settings: int) -> Engine:
    """An engine whose executor answers its n-th step, from 0 on, with refuse(batch, n) if not None."""

    class Refusing(FakeExecutor):
        asked = -1

        def _launch(self, batch: UnifiedBatch):
            self.asked += 1
            answer = refuse(batch, self.asked)
            return super()._launch(batch) if answer is None else answer

    config = EngineConfig(block_size=4, max_model_len=64, **settings)
    return Engine(Refusing(config), FakeCodec(), config, backend="fake", backend_reason="test")


def _two(engine: Engine) -> list[Event]:
    for name in ("a", "b"):
        engine.submit(Submit(name, name * 5, SamplingParams(max_tokens=6, ignore_eos=True)))
    return drain(engine)


def test_a_step_that_is_deferred_preempts_one_and_changes_no_output() -> None:
    plain = _two(make())
    engine = _refusing(lambda batch, n: Deferred(1) if n == 2 else None)
    events = _two(engine)
    assert [ids_of(events, name) for name in "ab"] == [ids_of(plain, name) for name in "ab"]
    assert [end_of(events, name).stats.preemptions for name in "ab"] == [0, 1]


def test_a_step_that_is_always_deferred_ends_in_failures() -> None:
    events = _two(_refusing(lambda batch, n: Deferred(1)))
    assert all(isinstance(end_of(events, name).error, CapacityError) for name in "ab")


@pytest.mark.parametrize(("blamed", "failed"), [(1, ["b"]), (None, ["a", "b"])])
def test_a_step_that_is_not_submitted_fails_whom_it_blames(blamed: int | None, failed: list[str]) -> None:
    def refuse(batch: UnifiedBatch, n: int) -> NotSubmitted | None:
        if n != 2:
            return None
        ids = () if blamed is None else (batch.items[blamed].cache_id,)
        return NotSubmitted(FerrumError("no"), ids)

    events = _two(_refusing(refuse))
    assert [name for name in "ab" if isinstance(end_of(events, name), Failed)] == failed


def test_a_forward_that_fails_loses_also_who_had_no_part_in_it() -> None:
    """Their KV lay in the same pools."""

    def refuse(batch: UnifiedBatch, n: int) -> None:
        if n == 1:
            assert len(batch.items) == 2
            raise RuntimeError("the device is gone")

    engine = _refusing(refuse, max_prefill_chunk=4, prefill_while_decoding=1)
    for name, prompt in (("long", "x" * 10), ("late", "y" * 10), ("short", "z")):
        engine.submit(Submit(name, prompt, SamplingParams(max_tokens=6)))
    events = drain(engine)
    assert all(isinstance(end_of(events, name), Failed) for name in ("long", "late", "short"))


def test_a_prefill_that_completes_in_part_goes_on_from_there() -> None:
    class Slow(FakeExecutor):
        def _run(self, item: UnifiedItem) -> ItemResult:
            if len(item.q_tokens) <= 3:
                return super()._run(item)
            super()._run(replace(item, q_tokens=item.q_tokens[:3], is_final_chunk=False))
            return ItemResult(item.cache_id, (), num_tokens=3)

    config = EngineConfig(block_size=4, max_model_len=64)
    engine = Engine(Slow(config), FakeCodec(), config, backend="fake", backend_reason="test")
    events = say(engine, "a prompt", max_tokens=4, ignore_eos=True)
    assert ids_of(events, "r") == ids_of(say(make(), "a prompt", max_tokens=4, ignore_eos=True), "r")
    steps = [e.stats for e in events if isinstance(e, Stepped)]
    assert [(s.prefill_tokens, s.decode_tokens) for s in steps] == [(3, 0), (3, 0), (2, 0)] + [(0, 1)] * 3


class _Choking(FakeCodec):
    """A codec that raises what no FerrumError is, on the way in and on the way out."""

    def encode(self, text: str) -> list[int]:
        if text == "unreadable":
            raise ValueError("no such text\nat all")
        return super().encode(text)

    def detokenizer(self, *, with_tags: bool = False):
        codec, inner = self, super().detokenizer()

        class Detokenizer:
            def add(self, token: int) -> str:
                codec.added += 1
                if codec.added == 4:
                    raise IndexError("no such token")
                return inner.add(token)

            def finish(self) -> str:
                return inner.finish()

        return Detokenizer()

    added = 0


def test_a_fault_in_one_request_s_text_leaves_its_neighbours_alone() -> None:
    config = EngineConfig(block_size=4, max_model_len=64)
    engine = Engine(FakeExecutor(config), _Choking(), config, backend="fake", backend_reason="test")
    engine.submit(Submit("bad", "unreadable", SamplingParams()))
    engine.submit(Submit("worse", None, SamplingParams()))
    for name in ("a", "b"):
        engine.submit(Submit(name, "fine", SamplingParams(max_tokens=5, ignore_eos=True)))
    events = drain(engine)
    assert str(end_of(events, "bad").error).startswith("the prompt failed: ValueError: no such text at all")
    assert isinstance(end_of(events, "worse"), Failed)
    assert isinstance(end_of(events, "b"), Failed)  # the fourth token of all was its second
    assert ids_of(events, "a") == ids_of(say(make(), "fine", "a", max_tokens=5, ignore_eos=True), "a")


@pytest.mark.parametrize(
    "wrong", [lambda r: r[::-1], lambda r: r[:-1], lambda r: [replace(x, token_ids=()) for x in r]]
)
def test_results_that_do_not_answer_the_batch_are_refused(wrong) -> None:
    class Liar(FakeExecutor):
        def _launch(self, batch: UnifiedBatch):
            pending = super()._launch(batch)
            return replace(pending, results=wrong(pending.results))

    config = EngineConfig(block_size=4, max_model_len=64)
    engine = Engine(Liar(config), FakeCodec(), config, backend="fake", backend_reason="test")
    for name in ("a", "b"):
        engine.submit(Submit(name, name * 3, SamplingParams(max_tokens=5)))
    events = drain(engine)
    for name in ("a", "b"):
        assert isinstance(end_of(events, name).error, ContractError)
        assert ids_of(events, name) == []
