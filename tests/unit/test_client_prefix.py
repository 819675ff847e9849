"""The prefix cache as users meet it: what a turn finds of the turns before, and that no answer changes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import build
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.cli import linear
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.llm import LLM, RequestOutput
from ferrum_mlx.messages import ChatMessage
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.tokenizer import load_tokenizer

from .chat_engine import ANSWER, BLOCK, build_chat

GOLDEN = Path(__file__).parents[1] / "parity" / "smollm2_golden.json"
PARAMS = SamplingParams(max_tokens=100)
SAMPLING = SamplingChoice({"max_tokens": 100}, suggest=False)
OPENING = [
    {"role": "system", "content": "be kind to whoever asks"},
    {"role": "user", "content": "hello there"},
]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(build, "build_engine", build_chat)
    with LLM(backend="fake") as llm:
        yield llm


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(build, "build_engine", build_chat)
    with LLM(backend="fake", prefix_cache=False) as cold:
        yield cold


def blocks(tokens: int) -> int:
    """Tokens of the whole blocks among so many."""
    return tokens // BLOCK * BLOCK


def turn(history: list[ChatMessage], output: RequestOutput, text: str) -> list[ChatMessage]:
    """The conversation when the user says more behind an answer."""
    return [*history, {"role": "assistant", "content": output.text}, {"role": "user", "content": text}]


def ask(
    llm: LLM, history: list[ChatMessage], params: SamplingParams = PARAMS, **settings: Any
) -> RequestOutput:
    (output,) = llm.chat(history, params, **settings)
    assert output.finish_reason == "stop"
    return output


def test_each_turn_finds_all_turns_before(llm: LLM, cold: LLM) -> None:
    history: list[ChatMessage] = OPENING
    known = 0  # tokens whose KV the turns before have left: all but the answer's last one
    for text in ("and then?", "why so?", "what else is there to say?"):
        output = ask(llm, history)
        assert len(output.token_ids) == ANSWER + 1
        assert output.usage.cached_tokens == blocks(known)
        without = ask(cold, history)
        assert (without.token_ids, without.usage.cached_tokens) == (output.token_ids, 0)
        known = output.usage.prompt_tokens + ANSWER
        history = turn(history, output, text)


def test_an_edit_of_an_earlier_message_finds_what_stands_before_it(llm: LLM, cold: LLM) -> None:
    first = ask(llm, OPENING)
    history = turn(OPENING, first, "why so, and what is it that makes you think that?")
    ask(llm, turn(history, ask(llm, history), "tell me more"))
    edited = [*history[:-1], {"role": "user", "content": "why so, or is it not?"}]
    branch = ask(llm, edited)
    asked = len(">\n<user\nwhy so, ")  # a token each, marks included
    common = first.usage.prompt_tokens + ANSWER + asked
    assert branch.usage.cached_tokens == blocks(common)
    assert branch.token_ids == ask(cold, edited).token_ids
    assert ask(llm, history).usage.cached_tokens > blocks(common)  # the other branch is still there


def test_a_message_edited_at_the_beginning_finds_nothing(llm: LLM) -> None:
    history = turn(OPENING, ask(llm, OPENING), "why so?")
    edited = [{"role": "system", "content": "Be kind to whoever asks"}, *history[1:]]
    assert ask(llm, edited).usage.cached_tokens == 0


def test_regenerate_finds_the_whole_prompt_less_its_tail(llm: LLM, cold: LLM) -> None:
    hot = replace(PARAMS, temperature=1.0, seed=1)
    first = ask(llm, OPENING, hot)
    again = ask(llm, OPENING, replace(hot, seed=2))
    assert again.usage.cached_tokens == blocks(first.usage.prompt_tokens - 1)
    assert again.token_ids == ask(cold, OPENING, replace(hot, seed=2)).token_ids
    assert again.token_ids != first.token_ids


@pytest.mark.parametrize("extra", range(BLOCK))
def test_regenerate_whatever_the_length_of_the_prompt(llm: LLM, extra: int) -> None:
    ids = [*range(97, 97 + BLOCK), *range(97, 97 + extra)]
    params = SamplingParams(max_tokens=5)
    first, again = (llm.generate(ids, params)[0] for _ in range(2))
    assert again.usage.cached_tokens == blocks(len(ids) - 1)
    assert again.token_ids == first.token_ids


def test_samples_compute_their_prompt_once(llm: LLM, cold: LLM) -> None:
    params = replace(PARAMS, n=4, temperature=1.0, seed=1)
    output = ask(llm, OPENING, params)
    prompt = output.usage.prompt_tokens
    tail = prompt - blocks(prompt - 1)
    assert output.usage.cached_tokens == 0
    assert llm._client.totals().prefill_tokens == prompt + 3 * tail
    without = ask(cold, OPENING, params)
    assert cold._client.totals().prefill_tokens == 4 * prompt
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in without.outputs]
    assert len({each.token_ids for each in output.outputs}) == 4
    assert ask(llm, OPENING, params).usage.cached_tokens == blocks(prompt - 1)


def test_prompts_of_one_call_share_their_beginning(llm: LLM, cold: LLM) -> None:
    asked = [[OPENING[0], {"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs, without = llm.chat(asked, PARAMS), cold.chat(asked, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in without]
    common = len("<system\nbe kind to whoever asks>\n<user\n")
    assert [output.usage.cached_tokens for output in outputs] == [0, blocks(common), blocks(common)]


@pytest.mark.parametrize("settings", [{"thinking": True}, {"template_args": {"level": "high"}}])
def test_template_settings_leave_the_hits(llm: LLM, settings: dict[str, Any]) -> None:
    first = ask(llm, OPENING, **settings)
    second = ask(llm, turn(OPENING, first, "why so?"), **settings)
    assert second.usage.cached_tokens == blocks(first.usage.prompt_tokens + ANSWER)


def test_off_is_off(cold: LLM) -> None:
    for _ in range(2):
        assert ask(cold, OPENING).usage.cached_tokens == 0
    assert (cold.metrics().cache.enabled, cold.metrics().kv.cached_blocks) == (False, 0)


def test_an_aborted_answer_leaves_what_it_computed(llm: LLM) -> None:
    """So stopping an answer and asking on costs no prompt again."""
    stream = llm._client.submit(OPENING, replace(PARAMS, ignore_eos=True, max_tokens=4000))
    next(stream)
    stream.abort()
    end = list(stream)[-1]
    prompt = end.usage.prompt_tokens  # type: ignore[union-attr]
    assert ask(llm, OPENING).usage.cached_tokens == blocks(prompt - 1)


def test_the_plain_chat_finds_its_turns_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sends back what it printed, and says what was found."""
    monkeypatch.setattr(build, "build_engine", build_chat)
    monkeypatch.setattr(EngineClient, "in_process", EngineClient.in_thread)
    monkeypatch.setattr(sys, "stdin", StringIO("hello\nand then?\nwhy so?\n"))
    assert linear.talk(EngineConfig(backend="fake"), SAMPLING, "be kind to whoever asks") == 0
    said = re.findall(r"prompt (\d+) tokens, (\d+) cached", capsys.readouterr().err)
    prompts, cached = ([int(pair[i]) for pair in said] for i in range(2))
    assert cached == [0, *(blocks(prompt + ANSWER) for prompt in prompts[:2])]


# The default model


def test_the_default_model_finds_its_own_answer_again(smollm2: ResolvedModel) -> None:
    asked: list[ChatMessage] = [{"role": "user", "content": "Name the colours of the rainbow."}]
    with LLM(str(smollm2.path), max_model_len=256, device="cpu") as llm:
        (first,) = llm.chat(asked, SamplingParams(max_tokens=8))
        (second,) = llm.chat(turn(asked, first, "And then?"), SamplingParams(max_tokens=1))
    assert second.usage.cached_tokens == blocks(first.usage.prompt_tokens + 7)


def test_answers_of_the_default_model_come_back_as_the_ids_they_were(smollm2: ResolvedModel) -> None:
    """All but one: a model may spell a name in other tokens than its tokenizer does. From there to the
    end of that answer, a next turn has to compute it again."""
    codec = load_tokenizer(smollm2)
    golden = json.loads(GOLDEN.read_text())
    misspelled = {6: 80}  # " A" "esch" "yt" "ra", which is encoded as " A" "es" "chy" "tra"
    for i, (prompt, output) in enumerate(zip(golden["prompts"], golden["outputs"], strict=True)):
        end = next((at for at, token in enumerate(output) if token in codec.eos_token_ids), None)
        known = [*prompt, *output[:end]]
        whole = codec.decode(known, skip_special_tokens=False)
        asked, answer = re.findall(
            "<\\|im_start\\|>(?:user|assistant)\n(.*?)(?:<\\|im_end\\|>|$)", whole, re.S
        )
        history = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        again = codec.encode_chat([*history, {"role": "user", "content": "And then?"}])
        same = sum(takewhile(bool, map(eq, known, again)))
        assert same == misspelled.get(i, len(known))
        assert i in misspelled or again[same] in codec.eos_token_ids
