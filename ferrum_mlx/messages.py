"""What an EngineClient and an engine say to each other: plain picklable messages.

Commands go in, events come out. The same ones serve an engine in a thread and in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrum_mlx.batch import TokenLogprobs
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.metrics import KVMap, KVUsage, RequestStats, StepStats, Timings, Usage
from ferrum_mlx.model_info import ModelInfo
from ferrum_mlx.sampling import SamplingParams

ChatMessage = dict[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text, …}
Prompt = str | list[int] | list[ChatMessage]  # raw text, token ids, or a conversation to template


# Commands


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is templated.

    Attributes:
        tools: JSON schemas of functions, as chat templates take them.
        thinking: None leaves it to the template; templates without the switch ignore it.
        template_args: further variables of the template.
    """

    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. A lower `priority` goes first; `sample_index` tells the n samples of a prompt apart."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    chat: ChatOptions = ChatOptions()
    priority: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class AskKVMap:
    """Answered by the KVMapAnswer of the same number, between two steps."""

    number: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


Command = Submit | Abort | AskKVMap | Shutdown


# Events


@dataclass(frozen=True, slots=True)
class Loading:
    """What the engine is doing before it is ready, in words for a user."""

    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine accepts requests. `notes` are things a user must be told: clamps, fallbacks."""

    info: ModelInfo
    backend: str
    backend_reason: str
    max_model_len: int
    kv: KVUsage
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a request; text may lag behind token_ids (split characters, stop strings).

    `thinking` is what a reasoning model says to itself; it is no part of `text`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    thinking: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token id, if asked for


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, after its last Delta. finish_reason: "stop", "length" or "abort"."""

    request_id: str
    stats: RequestStats
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's second token on, if asked for

    @property
    def finish_reason(self) -> str:
        return self.stats.finish_reason

    @property
    def usage(self) -> Usage:
        return self.stats.usage

    @property
    def timings(self) -> Timings:
        return self.stats.timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request by an error; finish reason "error". Its neighbours go on."""

    request_id: str
    error: FerrumError


@dataclass(frozen=True, slots=True)
class Stepped:
    stats: StepStats


@dataclass(frozen=True, slots=True)
class KVMapAnswer:
    """Every block's state now, or why that cannot be said."""

    number: int
    answer: KVMap | FerrumError


@dataclass(frozen=True, slots=True)
class Notice:
    """What a user must be told of an engine that runs."""

    what: str


@dataclass(frozen=True, slots=True)
class Died:
    """The engine is gone (a failed build, a crash, a killed process); every open request failed."""

    error: FerrumError


RequestEvent = Delta | Finished | Failed
Event = Loading | Ready | RequestEvent | Stepped | KVMapAnswer | Notice | Died
