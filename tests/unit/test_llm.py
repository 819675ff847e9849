"""The Python API, on the fake backend."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ferrum_mlx
from ferrum_mlx.errors import ContextLengthError, UsageError
from ferrum_mlx.events import Record, RequestQueued, StepDone
from ferrum_mlx.llm import LLM, RequestOutput
from ferrum_mlx.metrics import LoraMetrics
from ferrum_mlx.sampling import SamplingParams

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=5000, ignore_eos=True)
ASK = [{"role": "user", "content": "hello"}]
TOO_LONG = "x" * 9000


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(backend="fake", max_model_len=8192) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 60
    while llm.metrics().kv.used_blocks or llm.metrics().running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    outputs = llm.generate(prompts, SHORT)
    assert texts(outputs) == [llm.generate(prompt, SHORT)[0].text for prompt in prompts]
    first = outputs[0]
    assert (first.finish_reason, first.error) == ("length", None)
    assert len(first.token_ids) == first.usage.completion_tokens == 12
    assert first.usage.prompt_tokens == 3
    assert first.timings.ttft_s > 0


def test_outputs_keep_the_order_when_later_prompts_end_first(llm: LLM) -> None:
    lengths = [40, 3, 20, 1]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["one", "a much longer prompt " * 9, "3", "four"], params)
    assert [len(output.token_ids) for output in outputs] == lengths


def test_one_stands_for_a_list_of_one(llm: LLM) -> None:
    text = llm.generate(["hello"], SHORT)[0].text
    ids = list(b"hello")
    assert texts(llm.generate("hello", SHORT)) == [text]
    assert texts(llm.generate(ids, SHORT)) == [text]
    assert texts(llm.generate([ids, ids], SHORT)) == [text, text]
    assert texts(llm.chat(ASK, SHORT)) == texts(llm.chat([ASK], SHORT))
    assert texts(llm.chat(ASK, SHORT)) != [text]
    assert llm.generate([], SHORT) == []


def test_params_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b"], each)] == [3, 5]
    with pytest.raises(UsageError, match="2 params for 1 prompts"):
        llm.generate(["a"], each)


def test_stream_has_every_delta_and_the_whole_output_last(llm: LLM) -> None:
    prompts = ["one", "two"]
    whole = llm.generate(prompts, SHORT)
    deltas = list(llm.generate(prompts, SHORT, stream=True))
    for index, output in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == output.text
        assert sum((delta.token_ids for delta in mine), ()) == output.token_ids
        assert [delta.output is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].output is not None
        assert mine[-1].output.text == output.text
    assert next(iter(llm.chat(ASK, SHORT, stream=True))).index == 0


@pytest.mark.parametrize("how", ["close", "drop", "never started"])
def test_leaving_a_stream_frees_its_blocks(llm: LLM, how: str) -> None:
    stream: Any = llm.generate("go on", LONG, stream=True)
    if how != "never started":
        next(stream)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    wait_until_idle(llm)


def test_samples_differ_repeat_with_the_seed_and_are_each_what_they_are_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=4, seed=0, ignore_eos=True)
    first, second = llm.generate(["one", "two"], params)
    samples = texts([*first.outputs, *second.outputs])
    assert len(set(samples)) == 8
    assert texts(list(llm.generate("one", params)[0].outputs)) == samples[:4]
    assert llm.generate("one", replace(params, n=1))[0].text == first.text
    assert texts(list(llm.generate("one", replace(params, n=2))[0].outputs)) == samples[:2]
    assert first.usage.prompt_tokens == 3
    assert first.usage.completion_tokens == 48
    streamed = list(llm.generate("one", params, stream=True))
    for i in range(4):
        assert "".join(delta.text for delta in streamed if delta.sample == i) == samples[i]


def test_logprobs_reach_outputs_and_deltas(llm: LLM) -> None:
    params = replace(SHORT, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("hello", params)
    assert [token.token_id for token in output.logprobs] == list(output.token_ids)
    assert [(token.rank, len(token.top)) for token in output.logprobs] == [(1, 2)] * 12
    assert [token.token_id for token in output.prompt_logprobs] == list(b"ello")
    deltas = list(llm.generate("hello", params, stream=True))
    assert tuple(token for delta in deltas for token in delta.logprobs) == output.logprobs
    assert llm.generate("hello", SHORT)[0].logprobs == ()


def test_failed_request_does_not_lose_its_neighbours(llm: LLM) -> None:
    bad, good = llm.generate([TOO_LONG, "fine"], SHORT)
    assert (bad.finish_reason, bad.text, bad.token_ids) == ("error", "", ())
    assert isinstance(bad.error, ContextLengthError)
    assert good.text == llm.generate("fine", SHORT)[0].text


def test_when_all_failed_the_first_error_is_raised(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="9000 tokens"):
        llm.generate([TOO_LONG, TOO_LONG], SHORT)
    with pytest.raises(ContextLengthError):
        list(llm.generate(TOO_LONG, SHORT, stream=True))


async def test_async_twins(llm: LLM) -> None:
    prompts = ["one", "two"]
    whole = texts(llm.generate(prompts, SHORT))
    both = await asyncio.gather(llm.agenerate(prompts, SHORT), llm.achat(ASK, SHORT))
    assert texts(both[0]) == whole
    assert texts(both[1]) == texts(llm.chat(ASK, SHORT))
    parts = [delta.text async for delta in llm.agenerate("one", SHORT, stream=True)]
    assert "".join(parts) == whole[0]
    parts = [delta.text async for delta in llm.achat(ASK, SHORT, stream=True)]
    assert "".join(parts) == texts(both[1])[0]


async def test_cancelled_async_call_frees_its_blocks(llm: LLM) -> None:
    task = asyncio.ensure_future(llm.agenerate("go on", LONG))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await asyncio.to_thread(wait_until_idle, llm)


@pytest.mark.parametrize("prompts", [[1, "a"], ["a", 1], [None], [["a"]]])
def test_prompts_that_are_none(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("conversations", ["hello", ["hello"], [ASK, "x"], [1]])
def test_conversations_that_are_none(llm: LLM, conversations: Any) -> None:
    with pytest.raises(UsageError, match="conversation"):
        llm.chat(conversations, SHORT)


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match=r"'kv_memry'.*kv_memory"):
        LLM(backend="fake", kv_memry=1)
    with pytest.raises(UsageError, match="max_model_len"):
        LLM(backend="fake", max_model_len=0)


def test_close_ends_everything_and_is_idempotent() -> None:
    llm = LLM(backend="fake")
    stream = iter(llm.generate("go on", LONG, stream=True))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(ferrum_mlx.FerrumError, match="closed"):
        list(stream)
    with pytest.raises(ferrum_mlx.FerrumError, match="closed"):
        llm.generate("more")


def test_metrics_before_the_first_request(llm: LLM) -> None:
    assert llm.metrics().step == 0
    assert llm.metrics().kv.total_blocks > 0


def test_kv_map_has_every_block(llm: LLM) -> None:
    llm.generate("hello", SHORT)
    assert sum(map(len, llm.kv_map().blocks)) == llm.metrics().kv.total_blocks


def test_public_names_are_there_and_lazy() -> None:
    for name in ferrum_mlx.__all__:
        assert getattr(ferrum_mlx, name).__name__ == name
    assert set(ferrum_mlx.__all__) <= set(dir(ferrum_mlx))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = ferrum_mlx.nothing_here


@pytest.mark.parametrize("prompts", [5, None, b"hi", [5, "a"], [b"hi"]])
def test_prompts_of_a_wrong_type_are_refused_by_name(prompts: object) -> None:
    with LLM(backend="fake") as llm, pytest.raises(UsageError, match=r"prompts? is"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}]])
def test_params_of_a_wrong_type_are_refused_by_name(params: object) -> None:
    with LLM(backend="fake") as llm, pytest.raises(UsageError, match="params is"):
        llm.generate(["a"], params)


THINKS = [{"role": "user", "content": "ponder <think>"}]  # the fake model thinks behind an open tag


def test_thinking_is_apart_from_the_text(llm: LLM) -> None:
    thought, said = llm.chat([THINKS, ASK], SHORT)
    assert (thought.text, thought.thinking.encode()) == ("", bytes(thought.token_ids))
    assert (said.text.encode(), said.thinking) == (bytes(said.token_ids), "")
    bare = llm.generate("ponder <think>", SHORT)[0]
    assert (bare.text.encode(), bare.thinking) == (bytes(bare.token_ids), "")
    deltas = list(llm.chat(THINKS, SHORT, stream=True))
    assert "".join(delta.thinking for delta in deltas) == thought.thinking
    assert not any(delta.text for delta in deltas)


async def test_chat_settings_reach_the_template(llm: LLM) -> None:
    plain = llm.chat(ASK, SHORT)[0].usage.prompt_tokens
    settings: dict[str, Any] = {"tools": [{"name": "f"}], "thinking": False, "template_args": {"level": 3}}
    more = llm.chat(ASK, SHORT, **settings)[0].usage.prompt_tokens - plain
    assert more == len(json.dumps(settings))
    assert (await llm.achat(ASK, SHORT, **settings))[0].usage.prompt_tokens == plain + more


@pytest.mark.parametrize(
    "settings", [{"tools": {"name": "f"}}, {"tools": [print]}, {"template_args": [1]}, {"tools": 3}]
)
def test_chat_settings_of_a_wrong_type_are_refused_by_name(llm: LLM, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))} is .*; allowed"):
        llm.chat(ASK, SHORT, **settings)


def test_repeats_with_the_same_chat_settings_hit_the_prefix_cache(llm: LLM) -> None:
    settings: dict[str, Any] = {"tools": [{"name": "f" * 40}], "thinking": True}
    first = llm.chat(ASK, SHORT, **settings)[0]
    again = llm.chat(ASK, SHORT, **settings)[0]
    assert (first.usage.cached_tokens, again.usage.cached_tokens > 32) == (0, True)
    assert again.token_ids == first.token_ids


def test_what_chat_does_not_know_is_refused() -> None:
    with LLM(backend="fake") as llm:
        talk = [{"role": "user", "content": "hi"}]
        with pytest.raises(UsageError, match="tool'; allowed: template_args, thinking, tools"):
            llm.chat(talk, tool=[])  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="thinking is 'no'"):
            llm.chat(talk, thinking="no")  # type: ignore[call-overload]


def test_a_priority_reaches_the_engine(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with LLM(backend="fake", events=str(events)) as llm:
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1, priority=p) for p in (3, -1)])
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["priority"] for line in lines if line["event"] == "queued"] == [3, -1]
    with pytest.raises(UsageError, match="priority is True"):
        SamplingParams(priority=True)


def test_each_prompt_goes_through_its_adapter(tmp_path: Path) -> None:
    events: list[Record] = []
    folders = {"a": tmp_path, "b": tmp_path}
    prompt = "the same prompt, longer than a block of the pool is"
    with LLM(backend="fake", adapters=folders, on_event=events.append) as llm:
        outputs = llm.generate([prompt] * 4, SHORT, adapter=["a", None, "b", ""])
        assert [output.stats and output.stats.adapter for output in outputs] == ["a", "", "b", ""]
        assert [output.usage.cached_tokens for output in outputs] == [0, 0, 0, 48]
        (again,) = llm.generate(prompt, SHORT, adapter="b")
        assert again.usage.cached_tokens == 48
        (sampled,) = llm.chat(ASK, replace(SHORT, n=2, temperature=1.0), adapter="a")
        assert [sample.stats and sample.stats.adapter for sample in sampled.outputs] == ["a", "a"]
        streamed = list(llm.generate(prompt, SHORT, adapter="a", stream=True))
        assert streamed[-1].output is not None
        assert asyncio.run(llm.agenerate(prompt, SHORT, adapter="a"))[0].usage.cached_tokens == 48
        assert asyncio.run(llm.achat(ASK, SHORT, adapter="b"))[0].stats.adapter == "b"  # type: ignore[union-attr]
        wait_until_idle(llm)
        assert llm.metrics().lora == LoraMetrics(True, 2, {"a": 0, "b": 0})
        assert 'ferrum_lora_requests{adapter="a"' in llm.prometheus()
        for wrong, said in (
            ("c", "the adapter is 'c'; allowed: a, b, or none at all"),
            (["a"], "1 adapters for 2 prompts"),
            ({"a": 1}, "adapter is {'a': 1}"),
            ([1, 2], "the adapter is 1"),
        ):
            with pytest.raises(UsageError) as caught:
                llm.generate([prompt, prompt], SHORT, adapter=wrong)  # type: ignore[arg-type]
            assert said in str(caught.value)
    queued = [event.adapter for event in events if isinstance(event, RequestQueued)]
    assert queued[:4] == ["a", "", "b", ""]
    busiest = max(e.stats.lora.active["a"] for e in events if isinstance(e, StepDone))
    assert busiest == 2


def test_without_adapters_none_can_be_chosen(llm: LLM) -> None:
    assert llm.metrics().lora == LoraMetrics()
    with pytest.raises(UsageError, match="no adapter is loaded; --adapter NAME=FOLDER loads one"):
        llm.generate("hello", SHORT, adapter="a")
