"""The requests of each workload, and when they are due."""

from __future__ import annotations

import pytest

from ferrum_mlx.bench import workloads
from ferrum_mlx.bench.trace import Stream, Trace
from ferrum_mlx.bench.workloads import WORKLOADS, Arrival, Arriving, Case

RANDOM = [name for name in WORKLOADS if not WORKLOADS[name]().texts]


def lengths(case: Case) -> list[int]:
    return [len(arrival.prompt) for arrival in case.make("seed", 1000)]


@pytest.mark.parametrize("name", RANDOM)
def test_same_seed_same_prompts_another_seed_others(name: str) -> None:
    case = WORKLOADS[name]()
    prompts = [[tuple(a.prompt) for a in case.make(seed, 1000)] for seed in ("0", "0", "1")]
    assert prompts[0] == prompts[1]
    assert not set(prompts[0]) & set(prompts[2])


@pytest.mark.parametrize("name", RANDOM)
def test_nothing_is_longer_than_is_said_and_no_id_too_large(name: str) -> None:
    case = WORKLOADS[name]()
    arrivals = case.make("0", 70)
    assert max(token for arrival in arrivals for token in arrival.prompt) < 70
    known: dict[str, int] = {}
    for arrival in arrivals:
        known[arrival.name] = known.get(arrival.follows, 0) + len(arrival.prompt) + arrival.max_tokens
    assert max(known.values()) <= case.longest
    assert case.at_once == all(arrival.after == 0 for arrival in arrivals)


def test_llama_bench_s_names() -> None:
    assert workloads.prefill(512, 0, 1).name == "pp512"
    assert workloads.prefill(512, 2048, 1).name == "pp512 @ d2048"
    assert workloads.decode(128, 2048, 4, 512).name == "tg128 @ d2048"


def test_a_depth_is_computed_before_and_the_prompt_goes_behind_it() -> None:
    depth, prompt = workloads.prefill(64, 100, 1).make("0", 1000)
    assert (len(depth.prompt), depth.measured) == (100, False)
    assert (len(prompt.prompt), prompt.follows, prompt.after) == (64, depth.name, 1)


def test_streams_that_may_start_early_say_more() -> None:
    arrivals = workloads.decode(128, 256, 8, 512).make("0", 1000)
    assert [a.max_tokens for a in arrivals] == [132] * 8  # 2,048 prompt tokens are four steps
    assert [a.max_tokens for a in workloads.decode(128, 2048, 1, 512).make("0", 1000)] == [128]


def test_ragged_prompts_span_the_range() -> None:
    found = sorted(lengths(workloads.ragged()))
    assert (len(found), found[0], found[-1]) == (16, 32, 1024)


def test_a_prefix_is_shared_and_tails_are_not() -> None:
    prompts = [tuple(a.prompt) for a in workloads.shared_prefix().make("0", 1000)]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:] for prompt in prompts}) == len(prompts)


def test_the_edited_text_is_long_and_each_chat_another() -> None:
    assert 1000 < len(WORKLOADS["edit"]().texts[0]) < 2000  # some 300 tokens
    assert len(set(WORKLOADS["chat"]().texts)) == workloads.PAIRS


def test_who_is_due_depends_on_tokens_and_on_who_has_ended() -> None:
    arrivals = [
        Arrival("one", [1, 2], 3),
        Arrival("two", [7], 2, after=2),
        Arrival("next", [9], 2, after=1, follows="one"),
    ]
    arriving, run = Arriving(arrivals), Trace()
    ((_, one),) = arriving.due(run, 0.0)
    one.add(1.0, [5])
    assert arriving.due(run, 1.0) == []
    one.add(2.0, [6, 8])
    assert [arrival.name for arrival, _ in arriving.due(run, 2.0)] == ["two"]
    one.ended = True
    ((_, following),) = arriving.due(run, 3.0)
    assert (following.prompt, following.arrived) == ([1, 2, 5, 6, 8, 9], 3.0)
    assert [stream.name for stream in run.streams] == ["one", "two", "next"]
    assert not arriving


def test_tokens_of_a_stream_that_tells_no_ids_count_too() -> None:
    run = Trace([Stream("text", [1], 0.0, times=[1.0, 2.0])])
    assert [a.name for a, _ in Arriving([Arrival("two", [1], 1, after=2)]).due(run, 2.0)] == ["two"]
