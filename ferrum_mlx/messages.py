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
from ferrum_mlx.model_info import Capabilities, MemoryRequirements, ModelInfo
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.view import EngineView

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
        continue_last: the last message is an answer that is not whole; the output goes on where it ends.
    """

    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. A lower `priority` goes first; `sample_index` tells the n samples of a prompt apart.

    `adapter` names one of EngineConfig.adapters; "" is the model without one.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    chat: ChatOptions = ChatOptions()
    priority: int = 0
    sample_index: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class AskKVMap:
    """Every block's state: a KVMap."""


@dataclass(frozen=True, slots=True)
class AskView:
    """What the engine holds: an EngineView."""


@dataclass(frozen=True, slots=True)
class AskTokenCount:
    """How many tokens a prompt has, by the engine's tokenizer and template: an int."""

    prompt: Prompt
    chat: ChatOptions = ChatOptions()


Question = AskKVMap | AskView | AskTokenCount
Answer = KVMap | EngineView | int | FerrumError


@dataclass(frozen=True, slots=True)
class Ask:
    """Answered by the Answered of the same number, between two steps or while there is no work."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True)
class Hold:
    """Begin no step for so many seconds, or until an Abort: somebody is about to decide on one."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


Command = Submit | Abort | Ask | Hold | Shutdown


# Events


@dataclass(frozen=True, slots=True)
class Loading:
    """What the engine is doing before it is ready, in words for a user."""

    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine accepts requests.

    Attributes:
        notes: things a user must be told: clamps, fallbacks.
        memory_limit_bytes: most that the device lets the engine hold without swapping; 0: not known.
        speculation: the proposer's name; "" where nothing is guessed.
    """

    info: ModelInfo
    backend: str
    backend_reason: str
    max_model_len: int
    kv: KVUsage
    notes: tuple[str, ...]
    capabilities: Capabilities
    memory: MemoryRequirements
    memory_limit_bytes: int
    speculation: str


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
class Answered:
    """What was asked, or why that cannot be said."""

    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Notice:
    """What a user must be told of an engine that runs."""

    what: str


@dataclass(frozen=True, slots=True)
class Died:
    """The engine is gone (a failed build, a crash, a killed process); every open request failed."""

    error: FerrumError


RequestEvent = Delta | Finished | Failed
Event = Loading | Ready | RequestEvent | Stepped | Answered | Notice | Died
