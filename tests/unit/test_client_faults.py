"""What goes wrong in one request stays in it: the engine, its neighbours and its other samples go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest

from ferrum_mlx import build
from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.batch import UnifiedBatch
from ferrum_mlx.capacity import NotSubmitted
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.detokenizer import Detokenizer, StopStrings
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import EngineDiedError, FerrumError, UsageError
from ferrum_mlx.events import Record
from ferrum_mlx.executor import Submission
from ferrum_mlx.llm import LLM, RequestOutput
from ferrum_mlx.messages import ChatMessage, ChatOptions, Delta, Died, Failed, Loading, Notice, Ready
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.thinking import Splitter

from .client_driver import FAKE, SHORT, Scripted, until

SEEDED = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5, ignore_eos=True)
BAD = "bad"  # a prompt that has it is the one in which things go wrong


def raising(*_: object) -> NoReturn:
    raise LookupError("nothing\nlike that")


@dataclass
class Brittle:
    """Wraps what a codec makes; the method of that name raises at its `call`-th call."""

    inner: object
    method: str
    call: int = 1
    calls: int = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def method(*args: object) -> object:
            self.calls += name == self.method
            return raising() if self.calls == self.call else getattr(self.inner, name)(*args)

        return method


class BrittleCodec(FakeCodec):
    """Raises where `fault` says, for conversations and texts that have BAD in them alone."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.is_bad = False  # of the request that is taken now: an engine takes one after the other

    def encode(self, text: str) -> list[int]:
        self.is_bad = BAD in text
        self._break("prompt")
        return super().encode(text)

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = ChatOptions()) -> list[int]:  # noqa: B008
        self.is_bad = BAD in messages[-1]["content"]
        self._break("template")
        return super().encode_chat(messages, options)

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        self._break("words")
        return super().encode_words(words)

    def detokenizer(self, *, with_tags: bool = False) -> Detokenizer:  # type: ignore[override]
        self._break("detokenizer")
        return self._brittle(super().detokenizer(with_tags=with_tags), "detokenizer")  # type: ignore[return-value]

    def splitter(self, prompt: Sequence[int]) -> Splitter:
        self._break("splitter")
        return self._brittle(super().splitter(prompt), "splitter")  # type: ignore[return-value]

    def _break(self, where: str) -> None:
        if self.is_bad and self.fault == where:
            raising()

    def _brittle(self, inner: object, what: str) -> object:
        kind, _, method = self.fault.partition(".")
        return (
            Brittle(inner, method, 1 if method == "finish" else 4) if self.is_bad and kind == what else inner
        )


class Refusing(FakeExecutor):
    """Refuses rows that a bias marks, before anything has reached the device."""

    def _launch(self, batch: UnifiedBatch) -> Submission:
        blamed = tuple(item.cache_id for item in batch.items if 7 in item.sampling.params.logit_bias)
        return NotSubmitted(UsageError("a bias of token 7"), blamed) if blamed else super()._launch(batch)


@pytest.fixture
def brittle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LLM]]:
    made: list[LLM] = []

    def make(fault: str) -> LLM:
        def building(config: EngineConfig, *_: object) -> Engine:
            executor = Refusing(config)
            executor.prepare_startup()
            return Engine(executor, BrittleCodec(fault), config, backend="fake", backend_reason="a test")

        monkeypatch.setattr(build, "build_engine", building)
        made.append(LLM(backend="fake", max_model_len=4096))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def talk(content: str) -> list[ChatMessage]:
    return [{"role": "user", "content": content}]


def ids(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def see_neighbours_unharmed(llm: LLM, ask: Callable[..., list[RequestOutput]], bad: object) -> RequestOutput:
    """Two requests around a bad one, of one sample and of three; then the same after it."""
    good = [talk("one"), talk("two")] if ask == llm.chat else ["one", "two"]
    params = [SHORT, SEEDED]
    alone = ids(ask(good, params))
    first, failed, last = ask([good[0], bad, good[1]], [SHORT, replace(SEEDED, bad_words=("zz",)), SEEDED])
    assert ids([first, last]) == alone
    assert ids(ask(good, params)) == alone
    until(lambda: llm.metrics().kv.used_blocks == 0)
    assert llm._client._mailboxes == {}
    for sample in failed.outputs:
        assert sample.finish_reason == "error"
        assert "LookupError: nothing like that" in str(sample.error)
    return failed


@pytest.mark.parametrize("fault", ["prompt", "words", "detokenizer"])
def test_a_fault_on_the_way_in(brittle: Callable[[str], LLM], fault: str) -> None:
    llm = brittle(fault)
    failed = see_neighbours_unharmed(llm, llm.generate, BAD)
    assert ids([failed]) == [[(), (), ()]]


@pytest.mark.parametrize("fault", ["template", "splitter"])
def test_a_fault_on_a_conversation_s_way_in(brittle: Callable[[str], LLM], fault: str) -> None:
    llm = brittle(fault)
    see_neighbours_unharmed(llm, llm.chat, talk(BAD))


@pytest.mark.parametrize(
    ("fault", "tokens"),
    [("detokenizer.add", 3), ("detokenizer.finish", 11), ("splitter.feed", 3), ("splitter.finish", 11)],
)
def test_a_fault_on_the_way_out(brittle: Callable[[str], LLM], fault: str, tokens: int) -> None:
    llm = brittle(fault)
    failed = see_neighbours_unharmed(llm, llm.chat, talk(BAD))
    assert [len(sample.token_ids) for sample in failed.outputs] == [tokens] * 3  # what came before stands


@pytest.mark.parametrize("fault", ["detokenizer.finish", "splitter.finish"])
def test_a_fault_when_it_is_aborted(brittle: Callable[[str], LLM], fault: str) -> None:
    llm = brittle(fault)
    stream = llm._client.submit(talk(BAD), SamplingParams(ignore_eos=True))
    next(stream)
    stream.abort()
    end = list(stream)[-1]
    assert "LookupError" in str(getattr(end, "error", None))
    until(lambda: llm.metrics().kv.used_blocks == 0)
    assert len(llm.generate("fine", SHORT)[0].token_ids) == 12


def test_a_fault_in_stop_strings(brittle: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = brittle("")
    feed = StopStrings.feed

    def feed_or_raise(self: StopStrings, text: str, *, armed: bool = True) -> tuple[str, bool]:
        return raising() if self._stops == ("§",) else feed(self, text, armed=armed)

    alone = ids(llm.generate(["one", "two"], [SHORT, SEEDED]))
    monkeypatch.setattr(StopStrings, "feed", feed_or_raise)
    params = [SHORT, replace(SEEDED, stop="§"), SEEDED]
    first, failed, last = llm.generate(["one", "bad", "two"], params)
    assert ids([first, last]) == alone
    assert ["LookupError" in str(sample.error) for sample in failed.outputs] == [True] * 3


def test_a_row_that_the_executor_refuses(brittle: Callable[[str], LLM]) -> None:
    llm = brittle("")
    alone = ids(llm.generate(["one", "two"], [SHORT, SEEDED]))
    params = [SHORT, replace(SEEDED, logit_bias={7: 1.0}), SEEDED]
    first, failed, last = llm.generate(["one", "bad", "two"], params)
    assert ids([first, last]) == alone
    assert {str(sample.error) for sample in failed.outputs} == {"a bias of token 7"}


@pytest.mark.parametrize(
    "wrong", [{"logit_bias": {999: 1.0}}, {"stop_token_ids": [999]}, {"banned_token_ids": range(258)}]
)
def test_parameters_that_the_model_cannot_obey(
    brittle: Callable[[str], LLM], wrong: dict[str, object]
) -> None:
    llm = brittle("")
    alone = ids(llm.generate(["one", "two"], [SHORT, SEEDED]))
    params = [SHORT, replace(SEEDED, **wrong), SEEDED]  # type: ignore[arg-type]
    first, failed, last = llm.generate(["one", "bad", "two"], params)
    assert ids([first, last]) == alone
    assert all(isinstance(sample.error, UsageError) for sample in failed.outputs)


def test_one_sample_s_fault_is_not_its_siblings_(
    brittle: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = brittle("")
    alone = ids(llm.generate(["one", "two"], SEEDED))
    calls: list[int] = []

    def detokenizer(self: BrittleCodec, *, with_tags: bool = False) -> object:
        calls.append(1)
        inner = FakeCodec.detokenizer(self)
        return Brittle(inner, "add", 5) if len(calls) == 2 else inner  # the first prompt's second sample

    monkeypatch.setattr(BrittleCodec, "detokenizer", detokenizer)
    outputs = llm.generate(["one", "two"], SEEDED)
    broken = outputs[0].outputs[1]
    assert (broken.finish_reason, len(broken.token_ids)) == ("error", 4)
    assert broken.token_ids == alone[0][1][:4]
    kept = ids(outputs)
    kept[0][1] = alone[0][1]
    assert kept == alone
    assert outputs[0].usage.completion_tokens == 24  # of the two that have ended well


# Callbacks


def test_an_event_callback_that_raises() -> None:
    def on_event(record: Record) -> None:
        raising()

    with LLM(backend="fake") as plain, LLM(backend="fake", on_event=on_event) as llm:
        assert ids(llm.generate(["one", "two"], SEEDED)) == ids(plain.generate(["one", "two"], SEEDED))


def test_client_callbacks_that_raise_are_logged_and_harm_no_request(
    announced: Ready, caplog: pytest.LogCaptureFixture
) -> None:
    Scripted.posts = []
    client = EngineClient(FAKE, Scripted, on_loading=raising, on_died=raising, on_note=raising)
    client._launch()
    stream = client.submit("hello", request_id="mine")
    death = EngineDiedError("gone")
    Scripted.posts[0](
        [Loading("the weights"), announced, Notice("a note"), Delta("mine", "hi", (1,)), Died(death)]
    )
    assert client.death is death
    assert [type(event) for event in stream] == [Delta, Failed]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3
    assert "LookupError" in caplog.text


def test_an_error_says_what_it_was_in_one_line(brittle: Callable[[str], LLM]) -> None:
    with pytest.raises(FerrumError) as error:
        brittle("prompt").generate(BAD, SHORT)
    assert str(error.value).startswith("the prompt failed: LookupError: nothing like that; ")
