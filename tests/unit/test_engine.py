"""The engine over the fake backend: what a request gets, whatever else goes on."""

from __future__ import annotations

import random

import pytest

from ferrum_mlx.backends.fake import EOS, scripted
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.errors import ContextLengthError, UsageError
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Stepped, Submit
from ferrum_mlx.sampling import SamplingParams

from .engine_driver import drain, end_of, ids_of, make, say, text_of


def test_counts_and_reason_of_a_length_finish() -> None:
    engine = make()
    events = say(engine, "hello", max_tokens=7, ignore_eos=True)
    end = end_of(events, "r")
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 5, 7)
    assert len(ids_of(events, "r")) == 7
    steps = [e.stats for e in events if isinstance(e, Stepped)]
    assert [(s.prefill_tokens, s.decode_tokens) for s in steps] == [(5, 0)] + [(0, 1)] * 6


def test_eos_ends_unless_ignored() -> None:
    script = scripted([*b"hi", EOS, *b"more"], prompt_len=1)
    events = say(make(script), "x")
    assert text_of(events, "r") == "hi"
    assert end_of(events, "r").finish_reason == "stop"
    assert ids_of(events, "r") == [*b"hi", EOS]
    events = say(make(script), "x", max_tokens=7, ignore_eos=True)
    assert text_of(events, "r") == "himore"


@pytest.mark.parametrize("stop", ["##", "lo w"])
def test_a_stop_string_over_token_borders_leaks_nothing(stop: str) -> None:
    answer = b"hello world ## and more"
    events = say(make(scripted(list(answer), prompt_len=1)), "x", stop=(stop,))
    assert text_of(events, "r") == answer.decode().split(stop)[0]
    assert end_of(events, "r").finish_reason == "stop"
    assert bytes(ids_of(events, "r")).decode().endswith(stop)


def test_half_a_stop_string_at_the_end_is_not_lost() -> None:
    events = say(make(scripted(list(b"a#"), prompt_len=1)), "x", stop=("##",))
    assert text_of(events, "r") == "a#"
    events = say(make(scripted(list(b"a# b"), prompt_len=1)), "x", stop=("##",), max_tokens=2)
    assert (text_of(events, "r"), end_of(events, "r").finish_reason) == ("a#", "length")


def test_split_characters_arrive_whole() -> None:
    answer = "a–漢字👩‍🚀!"
    events = say(make(scripted(list(answer.encode()), prompt_len=1)), "x")
    deltas = [e.text for e in events if isinstance(e, Delta)]
    assert "".join(deltas) == answer
    assert not any("\N{REPLACEMENT CHARACTER}" in d for d in deltas)


@pytest.mark.parametrize(
    "settings", [{}, {"max_prefill_chunk": 3}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}]
)
def test_together_equals_alone(settings: dict[str, int]) -> None:
    prompts = {f"r{i}": "prompt " * (i % 3) + "x" * (i + 1) for i in range(6)}
    alone = {name: ids_of(say(make(), p, name, max_tokens=9), name) for name, p in prompts.items()}
    engine, events = make(**settings), []
    for name, prompt in prompts.items():
        engine.submit(Submit(name, prompt, SamplingParams(max_tokens=9)))
        events += engine.step()
    events += drain(engine)
    assert {name: ids_of(events, name) for name in prompts} == alone
    assert len(set(map(tuple, alone.values()))) == len(alone)  # the scripts do differ


def test_five_requests_on_a_pool_for_one_all_finish_unchanged() -> None:
    """Preempted requests keep their tokens, their noise and their usage."""
    prompts = {f"r{i}": "p" * (i + 3) for i in range(5)}
    hot = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    alone = {name: ids_of(say(make(), p, name, **hot), name) for name, p in prompts.items()}
    engine = make(kv_memory=7 * 4 * 4)  # 28 tokens
    for name, prompt in prompts.items():
        engine.submit(Submit(name, prompt, SamplingParams(**hot)))
    events = drain(engine)
    assert {name: ids_of(events, name) for name in prompts} == alone
    assert [e.stats.preemptions for e in events if isinstance(e, Stepped)][-1] > 0
    for name, prompt in prompts.items():
        usage = end_of(events, name).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)


def test_a_prompt_over_the_context_fails_alone() -> None:
    engine = make()
    engine.submit(Submit("long", "x" * 64, SamplingParams()))
    engine.submit(Submit("empty", "", SamplingParams()))
    engine.submit(Submit("ids", [1, 2, 999], SamplingParams()))
    engine.submit(Submit("good", "x" * 63, SamplingParams(max_tokens=50)))
    events = drain(engine)
    for name, kind in (("long", ContextLengthError), ("empty", ContextLengthError), ("ids", UsageError)):
        assert isinstance(end_of(events, name).error, kind)
    assert "64 tokens; allowed: 1 to 63" in str(end_of(events, "long").error)
    good = end_of(events, "good")
    assert (good.finish_reason, good.usage.completion_tokens) == ("length", 1)


def test_the_same_id_twice_is_refused_without_hurting_the_first() -> None:
    engine = make()
    engine.submit(Submit("r", "abc", SamplingParams(max_tokens=5)))
    engine.submit(Submit("r", "abc", SamplingParams(max_tokens=5)))
    ends = [e for e in drain(engine) if isinstance(e, (Finished, Failed))]
    assert [type(e) for e in ends] == [Failed, Finished]


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_abort_frees_at_once_and_leaves_the_neighbour_alone(steps: int) -> None:
    """Waiting, inside the prompt (chunks of 4), decoding."""
    expected = ids_of(say(make(), "neighbour", max_tokens=12), "r")
    engine, events = make(max_prefill_chunk=4), []
    engine.submit(Submit("r", "neighbour", SamplingParams(max_tokens=12)))
    engine.submit(Submit("gone", "y" * 10, SamplingParams(max_tokens=50)))
    for _ in range(steps):
        events += engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never was")
    quiet = make(max_prefill_chunk=4)  # the same without "gone"
    quiet.submit(Submit("r", "neighbour", SamplingParams(max_tokens=12)))
    for _ in range(steps):
        quiet.step()
    used, expected_used = (e.executor.kv_capacity_snapshot().used_blocks for e in (engine, quiet))
    assert used == expected_used
    events += drain(engine)
    assert [e for e in events if isinstance(e, Stepped)][-1].stats.kv.used_blocks == 0
    assert end_of(events, "gone").finish_reason == "abort"
    assert ids_of(events, "r") == expected


def test_a_priority_that_is_no_number_fails_alone() -> None:
    engine = make()
    engine.submit(Submit("good", "abc", SamplingParams(max_tokens=2)))
    engine.submit(Submit("bad", "abc", SamplingParams(), priority="high"))  # type: ignore[arg-type]
    events = drain(engine)
    assert isinstance(end_of(events, "bad").error, UsageError)
    assert isinstance(end_of(events, "good"), Finished)


def test_a_replay_is_prefill_whatever_its_chunks() -> None:
    engine = make(max_prefill_chunk=1, prefix_cache=False)
    engine.submit(Submit("r", "abc", SamplingParams(max_tokens=4, ignore_eos=True)))
    events = [event for _ in range(4) for event in engine.step()]  # three of the prompt, one decode
    engine._scheduler._preempt(engine._scheduler._running)
    events += drain(engine)
    steps = [e.stats for e in events if isinstance(e, Stepped)]
    assert [s.prefill_tokens for s in steps] == [1, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert [s.decode_tokens for s in steps] == [0, 0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert end_of(events, "r").stats.replayed_tokens == 4


def test_a_hundred_random_requests_leave_nothing_behind() -> None:
    rng = random.Random(3)
    engine = make(kv_memory=40 * 4 * 4, max_num_seqs=5, max_num_batched_tokens=16)
    alive: list[str] = []
    events: list[Event] = []
    for i in range(100):
        name = f"r{i}"
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        engine.submit(
            Submit(name, prompt, SamplingParams(max_tokens=rng.randint(1, 30), temperature=1.0, seed=i))
        )
        alive.append(name)
        for _ in range(rng.randint(0, 4)):
            events += engine.step()
        if rng.random() < 0.3:
            engine.abort(alive.pop(rng.randrange(len(alive))))
    events += drain(engine)
    ends = [e.request_id for e in events if isinstance(e, (Finished, Failed))]
    assert sorted(ends) == sorted(f"r{i}" for i in range(100))
    assert not any(isinstance(e, Failed) for e in events)


def test_decodes_never_wait_for_a_long_prompt() -> None:
    engine = make(max_num_batched_tokens=8)
    engine.submit(Submit("short", "ab", SamplingParams(max_tokens=30)))
    engine.step()
    engine.submit(Submit("long", "x" * 50, SamplingParams(max_tokens=2)))
    while engine.has_work():
        stats = [e.stats for e in engine.step() if isinstance(e, Stepped)]
        if stats and stats[0].prefill_tokens:
            assert stats[0].decode_tokens == 1
            assert stats[0].prefill_tokens <= 7


def test_samples_of_one_seed_differ_by_their_index_alone() -> None:
    def ids(sample_index: int) -> list[int]:
        engine = make()
        engine.submit(
            Submit(
                "r", "x", SamplingParams(temperature=1.0, seed=3, max_tokens=20), sample_index=sample_index
            )
        )
        return ids_of(drain(engine), "r")

    assert ids(0) == ids(0) != ids(1)


def test_what_is_barred_reaches_the_sampler() -> None:
    events = say(make(scripted(list(b"xaby"), prompt_len=1)), "x", bad_words=("ab",))
    assert text_of(events, "r") == "xacy"
    events = say(make(scripted([], prompt_len=1)), "x", min_tokens=3)
    assert [token == EOS for token in ids_of(events, "r")] == [False] * 3 + [True]


def test_fresh_seeds_differ_and_seed_zero_is_a_seed() -> None:
    hot = {"temperature": 1.0, "max_tokens": 20}
    drawn = [tuple(ids_of(say(make(), "x", **hot), "r")) for _ in range(3)]
    assert len(set(drawn)) == 3
    zeros = [tuple(ids_of(say(make(), "x", seed=0, **hot), "r")) for _ in range(2)]
    assert zeros[0] == zeros[1]
    assert RowSampling(seed=0) == RowSampling()
