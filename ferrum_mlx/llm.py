"""LLM: the Python API. An engine in a thread of this process, answers as plain objects.

with LLM() as llm:
    for output in llm.generate(["The sky is", "Water boils at"], SamplingParams(max_tokens=16)):
        print(output.text)
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Literal, Self, Unpack, overload

from ferrum_mlx.answers import Collector, OutputDelta, RequestOutput, in_order
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.events import Callback
from ferrum_mlx.inputs import (
    Adapters,
    ChatSettings,
    Conversations,
    Params,
    TextPrompts,
    adapters_of,
    as_conversations,
    as_prompts,
    chat_options,
    with_params,
)
from ferrum_mlx.messages import ChatOptions, Prompt, Ready
from ferrum_mlx.metrics import KVMap, StepStats
from ferrum_mlx.stream import RequestStream

_log = logging.getLogger("ferrum_mlx")


class LLM:
    """A model ready to generate. `close()`, or a `with` block, frees everything.

    One prompt or conversation may stand for a list of one; outputs keep the order of the prompts.
    A request that fails does not disturb the others: its output has finish_reason "error" and the
    error. When every request failed, the first error is raised instead.

    Leaving a `stream=True` iterator early, or cancelling an async call, aborts its requests.

    Args:
        model: catalogue alias, hub repository id, folder, or .gguf file; "" is the default model.
        backend: "auto", "mlx", "torch" or "fake".
        on_event: given each record of ferrum_mlx.events as it happens, in the engine's thread.
        config: the other fields of EngineConfig, such as adapters={"name": "folder"}.

    Raises:
        FerrumError: the settings, the model or the backend cannot be.
    """

    def __init__(
        self, model: str = "", backend: str = "auto", *, on_event: Callback | None = None, **config: Any
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(config.keys() - known):
            raise UsageError(
                f"LLM got the setting {shown(unknown[0])}", f"allowed: {', '.join(sorted(known))}"
            )
        settings = EngineConfig(model=model, backend=backend, **config)
        self._client = EngineClient.in_thread(settings, on_note=_warn, on_event=on_event)
        self._finalizer = weakref.finalize(self, self._client.close)
        self.ready: Ready = self._client.start()
        for note in self.ready.notes:
            _warn(note)

    @overload
    def generate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        adapter: Adapters = None,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: Literal[True],
        adapter: Adapters = None,
    ) -> Iterator[OutputDelta]: ...
    def generate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: bool = False,
        adapter: Adapters = None,
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        """Complete prompts: texts, or lists of token ids.

        Args:
            adapter: the name of a LoRA adapter that was loaded, one for all prompts or one each; None or ""
                is the model without one.
        """
        return self._run(as_prompts(prompts), params, stream, adapter)

    @overload
    def chat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: Literal[True],
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> Iterator[OutputDelta]: ...
    def chat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: bool = False,
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        """Answer conversations, lists of {"role": ..., "content": ...}, through the chat template.

        Args:
            adapter: as in `generate`.
            settings: `tools`, JSON schemas of functions; `thinking`, a switch that only templates of
                some reasoning models have; `template_args`, further variables of the template.
        """
        return self._run(as_conversations(conversations), params, stream, adapter, chat_options(settings))

    @overload
    def agenerate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        adapter: Adapters = None,
    ) -> Coroutine[None, None, list[RequestOutput]]: ...
    @overload
    def agenerate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: Literal[True],
        adapter: Adapters = None,
    ) -> AsyncIterator[OutputDelta]: ...
    def agenerate(
        self,
        prompts: TextPrompts,
        params: Params = None,
        *,
        stream: bool = False,
        adapter: Adapters = None,
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        """`generate` for asyncio: await it, or `async for` over it with stream=True."""
        return self._arun(as_prompts(prompts), params, stream, adapter)

    @overload
    def achat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> Coroutine[None, None, list[RequestOutput]]: ...
    @overload
    def achat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: Literal[True],
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> AsyncIterator[OutputDelta]: ...
    def achat(
        self,
        conversations: Conversations,
        params: Params = None,
        *,
        stream: bool = False,
        adapter: Adapters = None,
        **settings: Unpack[ChatSettings],
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        """`chat` for asyncio: await it, or `async for` over it with stream=True."""
        return self._arun(as_conversations(conversations), params, stream, adapter, chat_options(settings))

    def metrics(self) -> StepStats:
        """The engine's latest step: running and waiting requests, KV blocks, cache, preemptions."""
        return self._client.last_step or StepStats(kv=self.ready.kv)

    def kv_map(self, timeout: float = 5.0) -> KVMap:
        """The state of every KV block; waits for the step that runs, at most `timeout` seconds."""
        return self._client.kv_map(timeout)

    def prometheus(self) -> str:
        """Everything counted since the engine started, as Prometheus text."""
        from ferrum_mlx.prometheus import exposition

        return exposition(self._client.totals(), self.metrics(), self.ready.info.model_id)

    def close(self) -> None:
        """End the engine and whatever still runs; idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        params: Params,
        stream: bool,
        adapter: Adapters,
        chat: ChatOptions | None = None,
    ) -> list[RequestOutput] | Iterator[OutputDelta]:
        events = self._submit(prompts, params, adapter, chat)
        if stream:
            return self._deltas(events)
        return in_order(list(self._deltas(events)))

    def _arun(
        self,
        prompts: list[Prompt],
        params: Params,
        stream: bool,
        adapter: Adapters,
        chat: ChatOptions | None = None,
    ) -> Coroutine[None, None, list[RequestOutput]] | AsyncIterator[OutputDelta]:
        events = self._submit(prompts, params, adapter, chat)
        return self._adeltas(events) if stream else self._acollect(events)

    def _submit(
        self, prompts: list[Prompt], params: Params, adapter: Adapters, chat: ChatOptions | None
    ) -> RequestStream:
        chosen = adapters_of(prompts, adapter, self._client.config.adapter_names)
        return self._client.submit_all(with_params(prompts, params), chat=chat, adapters=chosen)

    def _deltas(self, events: RequestStream) -> Iterator[OutputDelta]:
        collector = Collector(events)
        with events:
            for event in events:
                yield collector.add(event)
        collector.raise_if_all_failed()

    async def _adeltas(self, events: RequestStream) -> AsyncIterator[OutputDelta]:
        collector = Collector(events)
        with events:
            async for event in events:
                yield collector.add(event)
        collector.raise_if_all_failed()

    async def _acollect(self, events: RequestStream) -> list[RequestOutput]:
        return in_order([delta async for delta in self._adeltas(events)])


def _warn(note: str) -> None:
    _log.warning("%s", note)
