"""One step ahead: the next step is submitted before the one in flight is read, where it may be."""

from __future__ import annotations

import pytest

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor, Script, hashed, scripted
from ferrum_mlx.batch import IN_FLIGHT, ItemResult, UnifiedBatch, UnifiedItem
from ferrum_mlx.capacity import Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.executor import Submission
from ferrum_mlx.messages import Failed, Finished, Submit
from ferrum_mlx.sampling import SamplingParams

from .engine_driver import drain, end_of, ids_of, say

PROMPT = [1, 2, 3, 4, 5]


class Watched(FakeExecutor):
    """Notes submits, as the number of items, and results, as "read"."""

    def __init__(self, config: EngineConfig, script: Script) -> None:
        super().__init__(config, script, one_step_ahead=True)
        self.log: list[int | str] = []

    def submit(self, batch: UnifiedBatch) -> Submission:  # type: ignore[misc]
        self.log.append(len(batch.items))
        return super().submit(batch)

    def _take(self, flight):
        self.log.append("read")
        return super()._take(flight)


def make(script: Script = hashed, **settings) -> tuple[Engine, Watched]:
    config = EngineConfig(**({"block_size": 4, "max_model_len": 64} | settings))
    executor = Watched(config, script)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test"), executor


def test_a_step_is_submitted_before_the_one_before_is_read() -> None:
    engine, executor = make()
    say(engine, PROMPT, max_tokens=4)
    assert executor.log == [1, 1, "read", 1, "read", 1, "read", "read"]
    decodes = [batch.items[0].q_tokens for batch in executor.batches][1:]
    assert decodes == [(IN_FLIGHT,)] * 3


def test_a_stop_wastes_one_row_and_the_length_none() -> None:
    engine, executor = make(scripted([65, 66], len(PROMPT)))
    events = say(engine, PROMPT)
    assert ids_of(events, "r") == [65, 66, 256]
    assert len(executor.batches) == 4  # a prompt, two decodes, and one behind the end
    engine, executor = make(scripted([65, 66], len(PROMPT)))
    say(engine, PROMPT, max_tokens=2)
    assert len(executor.batches) == 2


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"bad_words": ("x",)}])
def test_a_row_that_looks_back_makes_the_step_wait(params: dict) -> None:
    engine, executor = make()
    say(engine, PROMPT, max_tokens=3, **params)
    assert executor.log == [1, "read"] * 3
    say(engine, PROMPT, name="again", max_tokens=2)
    assert executor.log[6:] == [1, 1, "read", "read"]


def test_prompt_logprobs_of_chunks_that_overlap_in_time() -> None:
    engine, executor = make(max_prefill_chunk=2)
    end = end_of(say(engine, PROMPT, max_tokens=2, prompt_logprobs=0), "r")
    assert executor.log[:3] == [1, 1, "read"]
    assert isinstance(end, Finished)
    assert [entry.token_id for entry in end.prompt_logprobs] == PROMPT[1:]


def test_others_join_and_leave_while_a_step_is_in_flight() -> None:
    """Four requests of different lengths give what each gives alone."""
    alone = [ids_of(say(make()[0], [*PROMPT, i], max_tokens=3 + i), "r") for i in range(4)]
    engine, executor = make()
    events = []
    for i in range(4):
        engine.submit(Submit(f"r{i}", [*PROMPT, i], SamplingParams(max_tokens=3 + i)))
        events += engine.step()
    events += drain(engine)
    assert [ids_of(events, f"r{i}") for i in range(4)] == alone
    assert executor.log.count("read") == len(executor.batches)


def test_a_full_pool_preempts_when_it_is_quiet() -> None:
    engine, _ = make(kv_memory=5 * 16, max_num_seqs=4)
    for i in range(3):
        engine.submit(Submit(f"r{i}", [*PROMPT, i], SamplingParams(max_tokens=8, ignore_eos=True)))
    events = drain(engine)
    assert engine._scheduler.preemptions > 0
    for i in range(3):
        alone = ids_of(say(make()[0], [*PROMPT, i], max_tokens=8, ignore_eos=True), "r")
        assert ids_of(events, f"r{i}") == alone


def test_an_urgent_request_finds_every_sequence_taken_and_a_step_in_flight() -> None:
    """Nobody is admitted in a plan that is then given up."""
    engine, _ = make(max_num_batched_tokens=8, max_num_seqs=16)  # 8 at a time; the executor has room for more
    low = [f"r{i}" for i in range(8)]
    for i, name in enumerate(low):
        engine.submit(Submit(name, [65 + i], SamplingParams(max_tokens=8, ignore_eos=True), priority=1))
    engine.step()
    engine.submit(Submit("urgent", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
    events = drain(engine)
    assert all(isinstance(end_of(events, name), Finished) for name in [*low, "urgent"])
    assert engine._scheduler.preemptions == 1


def test_blocks_that_a_cancelled_step_still_holds_are_waited_for() -> None:
    engine, _ = make(kv_memory=4 * 16)
    engine.submit(Submit("r", PROMPT * 2, SamplingParams(max_tokens=4)))
    engine.step()
    engine.submit(Submit("next", PROMPT * 2, SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.abort("r")
    assert engine.executor.kv_capacity_snapshot().used_blocks == 3
    assert isinstance(end_of(drain(engine), "next"), Finished)


@pytest.mark.parametrize("refusal", [Deferred(1), NotSubmitted(FerrumError("no"), ())])
def test_a_step_that_is_refused_while_another_is_in_flight(
    refusal: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred, it comes once the other is done, and nobody makes way; else it fails as ever."""
    prompts = {"a": [97] * 5, "b": [98] * 5}
    alone = [
        ids_of(say(make()[0], prompt, max_tokens=6, ignore_eos=True), "r") for prompt in prompts.values()
    ]
    engine, executor = make()
    for name, prompt in prompts.items():
        engine.submit(Submit(name, prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_launch", lambda batch: refusal)
        events = engine.step()
    assert executor.log[-2:] == [2, "read"]
    events += drain(engine)
    assert engine._scheduler.preemptions == 0
    if isinstance(refusal, Deferred):
        assert [ids_of(events, name) for name in prompts] == alone
    else:
        assert all(isinstance(end_of(events, name), Failed) for name in prompts)


def test_a_lone_request_waits_for_blocks_that_a_cancelled_step_still_holds() -> None:
    """It is not found impossible while they are on their way back."""
    alone = ids_of(say(make(kv_memory=5 * 16)[0], PROMPT, max_tokens=15, ignore_eos=True), "r")
    engine, _ = make(kv_memory=5 * 16, max_num_seqs=2)
    for name in ("r", "other"):
        engine.submit(Submit(name, PROMPT, SamplingParams(max_tokens=15, ignore_eos=True)))
    events = []
    while engine.executor.kv_capacity_snapshot().free_blocks > 1:
        events += engine.step()
    engine.abort("other")
    events += drain(engine)
    assert isinstance(end_of(events, "r"), Finished)
    assert ids_of(events, "r") == alone


def test_a_failed_forward_loses_both_steps_and_no_block() -> None:
    engine, executor = make()
    engine.submit(Submit("r", PROMPT, SamplingParams(max_tokens=9)))
    engine.step()

    def broken(batch: UnifiedBatch) -> Submission:
        raise RuntimeError("no device")

    executor._launch = broken  # type: ignore[method-assign]
    events = drain(engine)
    end = end_of(events, "r")
    assert isinstance(end, Failed)
    assert "no device" in str(end.error)
    del executor._launch
    assert isinstance(end_of(say(engine, PROMPT, max_tokens=2), "r"), Finished)


def test_a_failed_result_loses_who_runs_and_no_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = make(max_num_seqs=1)
    for name in ("r", "next"):
        engine.submit(Submit(name, PROMPT, SamplingParams(max_tokens=4)))
    engine.step()
    monkeypatch.setattr(executor._flights[0], "pending", None)
    events = drain(engine)
    assert isinstance(end_of(events, "r"), Failed)
    assert isinstance(end_of(events, "next"), Finished)


def test_a_chunk_that_completes_in_part_voids_the_step_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that asks for a step ahead computes its chunks whole."""
    engine, executor = make(max_prefill_chunk=4)
    whole = executor._run

    def part(item: UnifiedItem) -> ItemResult:
        whole(item)
        return ItemResult(item.cache_id, (), num_tokens=3)

    engine.submit(Submit("r", PROMPT * 2, SamplingParams(max_tokens=4)))
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_run", part)
        engine.step()
    end = end_of(drain(engine), "r")
    assert isinstance(end, Failed)
    assert "the next step is ahead" in str(end.error)


def test_shutdown_waits_for_what_is_in_flight() -> None:
    engine, executor = make()
    engine.submit(Submit("r", PROMPT, SamplingParams(max_tokens=9)))
    engine.step()
    assert executor.log == [1]
    engine.shutdown()
    assert executor.log == [1, "read"]
