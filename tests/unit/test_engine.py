"""The engine over the fake backend: what a request gets, whatever else goes on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ferrum_mlx.backends.fake import EOS, FakeCodec, FakeExecutor, scripted
from ferrum_mlx.batch import RowSampling, UnifiedBatch
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import ContextLengthError, ContractError, FerrumError, UsageError
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Stepped, Submit
from ferrum_mlx.sampling import SamplingParams


def make(script=None, **settings) -> Engine:
    config = EngineConfig(**({"block_size": 4, "max_model_len": 64} | settings))
    executor = FakeExecutor(config) if script is None else FakeExecutor(config, script)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test")


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work():
        events += engine.step()
    assert engine.executor.kv_capacity_snapshot().used_blocks == 0
    return events


def text_of(events: list[Event], request_id: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.request_id == request_id)


def ids_of(events: list[Event], request_id: str) -> list[int]:
    return [t for e in events if isinstance(e, Delta) and e.request_id == request_id for t in e.token_ids]


def end_of(events: list[Event], request_id: str) -> Finished | Failed:
    (end,) = [e for e in events if isinstance(e, (Finished, Failed)) and e.request_id == request_id]
    return end


def say(engine: Engine, prompt, name: str = "r", **params) -> list[Event]:
    engine.submit(Submit(name, prompt, SamplingParams(**params)))
    return drain(engine)


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


def test_fresh_seeds_differ_and_seed_zero_is_a_seed() -> None:
    hot = {"temperature": 1.0, "max_tokens": 20}
    drawn = [tuple(ids_of(say(make(), "x", **hot), "r")) for _ in range(3)]
    assert len(set(drawn)) == 3
    zeros = [tuple(ids_of(say(make(), "x", seed=0, **hot), "r")) for _ in range(2)]
    assert zeros[0] == zeros[1]
    assert RowSampling(seed=0) == RowSampling()
