"""Drafts in the mixed step, as the engine's events show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor, scripted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Stepped, Submit
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.accept import accepted
from ferrum_mlx.verify.guesses import Guesses

from .engine_driver import drain, end_of, ids_of, say, text_of

ANSWER = list(b"hello world, how are you")
PROMPT = [1, 2, 3, 4, 5]


def make(guess: Callable[[Request, int], Sequence[int]], **settings) -> tuple[Engine, Guesses]:
    config = EngineConfig(**({"block_size": 4, "max_model_len": 64} | settings))
    executor = FakeExecutor(config, scripted(ANSWER, len(PROMPT)))
    executor.prepare_startup()
    drafts = Guesses(guess)
    engine = Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test", speculation=drafts)
    return engine, drafts


def right(request: Request, room: int) -> list[int]:
    return ANSWER[len(request.output) :][:room]


def wrong_at(position: int) -> Callable[[Request, int], list[int]]:
    """Right but at one output position."""

    def guess(request: Request, room: int) -> list[int]:
        tokens = list(enumerate(right(request, room), len(request.output)))
        return [token ^ 1 if i == position else token for i, token in tokens]

    return guess


def deltas(events: list[Event]) -> list[tuple[int, ...]]:
    return [event.token_ids for event in events if isinstance(event, Delta)]


@pytest.mark.parametrize(
    ("drafts", "sampled", "output"),
    [
        ([], [7], (7,)),
        ([7, 8], [7, 8, 9], (7, 8, 9)),  # all accepted, and the bonus
        ([7, 8], [7, 1, 9], (7, 1)),  # recovered
        ([7, 8], [1, 8, 9], (1,)),
    ],
)
def test_the_rule(drafts: list[int], sampled: list[int], output: tuple[int, ...]) -> None:
    assert accepted(drafts, sampled) == output


def test_right_drafts_come_at_once_and_wrong_ones_never() -> None:
    engine, drafts = make(right)
    events = say(engine, PROMPT)
    assert bytes(ids_of(events, "r")[:-1]) == bytes(ANSWER)
    assert [len(ids) for ids in deltas(events)] == [1, 9, 9, 6]
    assert drafts.stats().acceptance_rate == 1
    engine, drafts = make(lambda request, room: [9] * room)
    events = say(engine, PROMPT)
    assert text_of(events, "r") == bytes(ANSWER).decode()
    assert {len(ids) for ids in deltas(events)} == {1}
    assert drafts.stats().accepted == 0


def test_the_step_counts_output_and_not_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafts = make(wrong_at(3))
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(drafts, "stepped", lambda rows, drafts, seconds: told.append((rows, drafts)))
    stats = [event.stats for event in say(engine, PROMPT) if isinstance(event, Stepped)]
    assert [step.decode_tokens for step in stats][:3] == [0, 3, 9]
    assert sum(step.decode_tokens for step in stats) == len(ANSWER)
    assert told[:3] == [(len(PROMPT), 0), (9, 8), (9, 8)]


def test_the_end_of_sequence_within_drafts_ends_the_output() -> None:
    engine, _ = make(lambda request, room: [*right(request, room), 256, 65, 65][:room])
    events = say(engine, PROMPT)
    end = end_of(events, "r")
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.completion_tokens) == ("stop", len(ANSWER) + 1)


def test_a_stop_string_within_drafts_ends_the_output_there() -> None:
    engine, drafts = make(right)
    events = say(engine, PROMPT, stop=("wor",))
    assert text_of(events, "r") == "hello "
    assert bytes(ids_of(events, "r")) == b"hello wor"
    end = end_of(events, "r")
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.completion_tokens) == ("stop", 9)
    assert (drafts.stats().drafted, drafts.stats().accepted) == (8, 8)  # the last of them for nothing


def test_never_more_than_max_tokens() -> None:
    for length in range(1, 12):
        engine, _ = make(right)
        assert bytes(ids_of(say(engine, PROMPT, max_tokens=length), "r")) == bytes(ANSWER[:length])


def test_logprobs_go_with_the_tokens_that_come_out() -> None:
    engine, _ = make(wrong_at(4))
    events = say(engine, PROMPT, logprobs=0)
    for event in events:
        if isinstance(event, Delta):
            assert tuple(entry.token_id for entry in event.logprobs) == event.token_ids


def test_what_was_accepted_is_found_by_the_next_prompt() -> None:
    """Also the blocks of an output that drafts have filled, and the last of them."""
    engine, _ = make(right)
    say(engine, PROMPT, max_tokens=12)
    again = [*PROMPT, *ANSWER[:11], 1]
    events = say(engine, again, name="again", max_tokens=1)
    end = end_of(events, "again")
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 16


def test_drafts_are_dropped_before_anyone_makes_way() -> None:
    """Two requests that just fit without drafts."""
    blocks = 2 * 3
    engine, drafts = make(right, kv_memory=blocks * 16, max_num_seqs=2)
    for name in "ab":
        engine.submit(Submit(name, PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    events = drain(engine)
    for name in "ab":
        assert bytes(ids_of(events, name)) == bytes(ANSWER[:8])
    assert engine._scheduler.preemptions == 0
    assert drafts.stats().drafted > 0


def test_drafts_keep_nobody_waiting() -> None:
    """They are added behind whoever comes in: the pool has room for both prompts, and nothing besides."""
    engine, drafts = make(right, kv_memory=5 * 16, max_num_seqs=2)
    engine.submit(Submit("a", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    engine.submit(Submit("b", [9] * 12, SamplingParams(max_tokens=1, ignore_eos=True)))
    events = engine.step()
    assert isinstance(end_of(events, "b"), Finished)
    assert drafts.stats().drafted == 0
    assert bytes(ids_of(drain(engine), "a")) == bytes(ANSWER[2:8])
    assert drafts.stats().drafted > 0


def test_drafts_give_way_to_requests_that_come_back_to_decode() -> None:
    """What a preempted one finds cached is all but its last token, and no room was kept for that row."""
    engine, _ = make(lambda request, room: [9] * room, max_num_batched_tokens=8, max_num_seqs=8)
    names = [f"high {i}" for i in range(2)] + [f"low {i}" for i in range(6)]
    for i, name in enumerate(names):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.submit(Submit(name, [65 + i] * (4 if i < 2 else 1), params, priority=int(i >= 2)))
    running = engine._scheduler._running
    while len(running) < 8 or any(entry.request.num_computed_tokens % 4 for entry in running[:2]):
        engine.step()
    for entry in running[:2]:
        engine._scheduler._preempt([entry])
    events = drain(engine)
    assert all(isinstance(end_of(events, name), Finished) for name in names)


def test_who_makes_way_loses_the_drafts_too() -> None:
    engine, drafts = make(right, max_num_seqs=1)
    engine.submit(Submit("low", PROMPT, SamplingParams(max_tokens=20), priority=1))
    engine.step()
    (low,) = engine._scheduler.running
    engine.submit(Submit("urgent", PROMPT, SamplingParams(max_tokens=1)))
    engine.step()
    assert (low.preemptions, low.drafts) == (1, [])
    assert bytes(ids_of(drain(engine), "low")) == bytes(ANSWER[1:20])
    assert drafts.stats().drafted == low.num_drafted


def test_drafts_leave_half_of_what_decodes_leave() -> None:
    engine, _ = make(right, max_num_batched_tokens=12, max_num_seqs=4)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    for name in "abcd":
        engine.submit(Submit(name, PROMPT, SamplingParams(max_tokens=20)))
    drain(engine)
    counts = [  # decodes, drafts
        (len(batch.items), batch.num_tokens - len(batch.items))
        for batch in executor.batches
        if all(item.pos_offset >= len(PROMPT) for item in batch.items)
    ]
    assert (4, 4) in counts
    assert all(drafts <= (12 - decodes) // 2 for decodes, drafts in counts)


def test_prefills_leave_the_drafts_their_half() -> None:
    """As they come in, and in their next chunk."""
    engine, _ = make(right, max_num_batched_tokens=12)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    engine.submit(Submit("a", PROMPT, SamplingParams(max_tokens=20)))
    engine.step()
    engine.submit(Submit("b", [9] * 30, SamplingParams(max_tokens=1)))
    for _ in range(2):
        engine.step()
        assert [len(item.q_tokens) for item in executor.batches[-1].items] == [1 + 5, 6]


def test_cancel_between_two_verifies_keeps_what_came() -> None:
    engine, _ = make(right)
    engine.submit(Submit("r", PROMPT, SamplingParams()))
    events = [event for _ in range(2) for event in engine.step()]
    engine.abort("r")
    events += drain(engine)
    assert text_of(events, "r") == bytes(ANSWER[:10]).decode()


def test_a_request_that_fails_to_verify_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make(right)
    monkeypatch.setattr(engine.executor, "truncate_kv", _broken)
    engine.submit(Submit("r", PROMPT, SamplingParams()))
    engine.submit(Submit("one", PROMPT, SamplingParams(max_tokens=1)))
    events = drain(engine)
    assert isinstance(end_of(events, "r"), Failed)
    assert isinstance(end_of(events, "one"), Finished)


def test_whatever_its_end_a_request_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafts = make(right)
    forgotten: list[str] = []
    monkeypatch.setattr(drafts, "forget", lambda request: forgotten.append(request.request_id))
    say(engine, PROMPT, name="finished", max_tokens=4)
    engine.submit(Submit("aborted", PROMPT, SamplingParams()))
    engine.step()
    engine.abort("aborted")
    monkeypatch.setattr(engine.executor, "truncate_kv", _broken)
    say(engine, PROMPT, name="failed")
    assert forgotten == ["finished", "aborted", "failed"]


def test_who_is_preempted_is_forgotten_and_goes_on() -> None:
    """What a proposer holds for it, others may need."""
    engine, drafts = make(right, max_num_seqs=1)
    forgotten: list[str] = []
    drafts.forget = lambda request: forgotten.append(request.request_id)  # type: ignore[method-assign]
    engine.submit(Submit("r", PROMPT, SamplingParams(max_tokens=20), priority=1))
    events = [event for _ in range(2) for event in engine.step()]
    engine.submit(Submit("urgent", PROMPT, SamplingParams(max_tokens=2)))
    events += drain(engine)
    assert forgotten == ["r", "urgent", "r"]
    assert bytes(ids_of(events, "r")) == bytes(ANSWER[:20])


def _broken(cache_id: int, new_len: int) -> None:
    raise FerrumError("it does not truncate")
