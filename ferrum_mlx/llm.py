"""LLM: the Python API. An engine in a thread of this process, answers as plain objects.

with LLM() as llm:
    for output in llm.generate(["The sky is", "Water boils at"], SamplingParams(max_tokens=16)):
        print(output.text)
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

from ferrum_mlx.client import EngineClient, RequestStream
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.messages import ChatMessage, Delta, Failed, Finished, Prompt, Ready, RequestEvent
from ferrum_mlx.metrics import StepStats, Timings, Usage
from ferrum_mlx.sampling import SamplingParams

TextPrompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Conversations = Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]]
Params = SamplingParams | Sequence[SamplingParams] | None
_log = logging.getLogger("ferrum_mlx")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's whole answer.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error".
        usage, timings: zeros after an error.
        error: why it failed; the text that came before stands in `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    error: FerrumError | None = None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of the prompt at `index`; the last one of each prompt carries its whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class LLM:
    """A model ready to generate. `close()`, or a `with` block, frees everything.

    One prompt or conversation may stand for a list of one; outputs keep the order of the prompts.
    A request that fails does not disturb the others: its output has finish_reason "error" and the
    error. When every request failed, the first error is raised instead.

    Leaving a `stream=True` iterator early, or cancelling an async call, aborts its requests.

    Args:
        model: catalogue alias, hub repository id, folder, or .gguf file; "" is the default model.
        backend: "auto", "mlx", "torch" or "fake".
        config: the other fields of EngineConfig.

    Raises:
        FerrumError: the settings, the model or the backend cannot be.
    """

    def __init__(self, model: str = "", backend: str = "auto", **config: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(config.keys() - known):
            raise UsageError(f"LLM got the setting {unknown[0]!r}", f"allowed: {', '.join(sorted(known))}")
        self._client = EngineClient.in_thread(EngineConfig(model=model, backend=backend, **config))
        self._finalizer = weakref.finalize(self, self._client.close)
        self.ready: Ready = self._client.start()
        for note in self.ready.notes:
            _log.warning("%s", note)

    @overload
    def generate(
        self, prompts: TextPrompts, params: Params = None, *, stream: Literal[False] = False
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self, prompts: TextPrompts, params: Params = None, *, stream: Literal[True]
    ) -> Iterator[OutputDelta]: ...
    def generate(
        self, prompts: TextPrompts, params: Params = None, *, stream: bool = False
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        """Complete prompts: texts, or lists of token ids."""
        return self._run(_as_prompts(prompts), params, stream)

    @overload
    def chat(
        self, conversations: Conversations, params: Params = None, *, stream: Literal[False] = False
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self, conversations: Conversations, params: Params = None, *, stream: Literal[True]
    ) -> Iterator[OutputDelta]: ...
    def chat(
        self, conversations: Conversations, params: Params = None, *, stream: bool = False
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        """Answer conversations, lists of {"role": ..., "content": ...}, through the chat template."""
        return self._run(_as_conversations(conversations), params, stream)

    @overload
    def agenerate(
        self, prompts: TextPrompts, params: Params = None, *, stream: Literal[False] = False
    ) -> Coroutine[None, None, list[RequestOutput]]: ...
    @overload
    def agenerate(
        self, prompts: TextPrompts, params: Params = None, *, stream: Literal[True]
    ) -> AsyncIterator[OutputDelta]: ...
    def agenerate(
        self, prompts: TextPrompts, params: Params = None, *, stream: bool = False
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        """`generate` for asyncio: await it, or `async for` over it with stream=True."""
        return self._arun(_as_prompts(prompts), params, stream)

    @overload
    def achat(
        self, conversations: Conversations, params: Params = None, *, stream: Literal[False] = False
    ) -> Coroutine[None, None, list[RequestOutput]]: ...
    @overload
    def achat(
        self, conversations: Conversations, params: Params = None, *, stream: Literal[True]
    ) -> AsyncIterator[OutputDelta]: ...
    def achat(
        self, conversations: Conversations, params: Params = None, *, stream: bool = False
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        """`chat` for asyncio: await it, or `async for` over it with stream=True."""
        return self._arun(_as_conversations(conversations), params, stream)

    def metrics(self) -> StepStats:
        """The engine's latest step: running and waiting requests, KV blocks, preemptions."""
        return self._client.last_step or StepStats(0, 0.0, 0, 0, 0, 0, 0, self.ready.kv)

    def close(self) -> None:
        """End the engine and whatever still runs; idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, prompts: list[Prompt], params: Params, stream: bool
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        events = self._client.submit_all(_with_params(prompts, params))
        if stream:
            return self._deltas(events)
        return _ordered(list(self._deltas(events)))

    def _arun(
        self, prompts: list[Prompt], params: Params, stream: bool
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        events = self._client.submit_all(_with_params(prompts, params))
        return self._adeltas(events) if stream else self._acollect(events)

    def _deltas(self, events: RequestStream) -> Iterator[OutputDelta]:
        collector = _Collector(events)
        with events:
            for event in events:
                yield collector.add(event)
        collector.raise_if_all_failed()

    async def _adeltas(self, events: RequestStream) -> AsyncIterator[OutputDelta]:
        collector = _Collector(events)
        with events:
            async for event in events:
                yield collector.add(event)
        collector.raise_if_all_failed()

    async def _acollect(self, events: RequestStream) -> list[RequestOutput]:
        return _ordered([delta async for delta in self._adeltas(events)])


def collect(events: RequestStream) -> list[RequestOutput]:
    """Wait for every request of a stream; one output each, in order, errors included."""
    collector = _Collector(events)
    with events:
        return _ordered([collector.add(event) for event in events])


class _Collector:
    """Turns the events of a stream into deltas, and at each request's end into its output."""

    def __init__(self, stream: RequestStream) -> None:
        self._index = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self._texts: list[list[str]] = [[] for _ in self._index]
        self._token_ids: list[list[int]] = [[] for _ in self._index]
        self._errors: dict[int, FerrumError] = {}

    def add(self, event: RequestEvent) -> OutputDelta:
        index = self._index[event.request_id]
        match event:
            case Delta(_, text, token_ids):
                self._texts[index].append(text)
                self._token_ids[index].extend(token_ids)
                return OutputDelta(index, text, token_ids)
            case Finished(_, reason, usage, timings):
                return OutputDelta(index, "", (), self._output(index, reason, usage, timings))
            case Failed(_, error):
                self._errors[index] = error
                output = self._output(index, "error", Usage(0, 0, 0), Timings(0.0, 0.0, 0.0), error)
                return OutputDelta(index, "", (), output)

    def raise_if_all_failed(self) -> None:
        if self._errors and len(self._errors) == len(self._index):
            raise self._errors[0]

    def _output(
        self, index: int, reason: str, usage: Usage, timings: Timings, error: FerrumError | None = None
    ) -> RequestOutput:
        text, token_ids = "".join(self._texts[index]), tuple(self._token_ids[index])
        return RequestOutput(text, token_ids, reason, usage, timings, error)


def _ordered(deltas: list[OutputDelta]) -> list[RequestOutput]:
    outputs = {delta.index: delta.output for delta in deltas if delta.output is not None}
    return [outputs[index] for index in sorted(outputs)]


def _as_prompts(prompts: TextPrompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise UsageError(
            f"prompts is {prompts!r}", "allowed: a text, a list of token ids, or a list of these"
        )
    if prompts and all(isinstance(part, int) for part in prompts):
        return [[part for part in prompts if isinstance(part, int)]]
    return [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]


def _token_ids(prompt: object) -> Prompt:
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        ids = [part for part in prompt if isinstance(part, int)]
        if len(ids) == len(prompt):
            return ids
    raise UsageError(f"a prompt is {prompt!r}", "allowed: a text, or a list of token ids")


def _as_conversations(conversations: Conversations) -> list[Prompt]:
    if not isinstance(conversations, Sequence):
        raise UsageError(
            f"conversations is {conversations!r}", "allowed: a list of messages, or a list of such"
        )
    single = bool(conversations) and all(isinstance(part, dict) for part in conversations)
    return [_messages(conversation) for conversation in ([conversations] if single else conversations)]


def _messages(conversation: object) -> Prompt:
    if isinstance(conversation, Sequence):
        messages = [part for part in conversation if isinstance(part, dict)]
        if len(messages) == len(conversation):
            return messages
    raise UsageError(
        f"a conversation is {conversation!r}", 'allowed: a list of {"role": ..., "content": ...}'
    )


def _with_params(prompts: list[Prompt], params: Params) -> list[tuple[Prompt, SamplingParams]]:
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in prompts]
    if isinstance(params, dict) or not all(isinstance(each, SamplingParams) for each in params):
        raise UsageError(f"params is {params!r}", "allowed: SamplingParams, one for all prompts or one each")
    if len(params) != len(prompts):
        raise UsageError(
            f"there are {len(params)} params for {len(prompts)} prompts", "allowed: one, or one each"
        )
    return list(zip(prompts, params, strict=True))
