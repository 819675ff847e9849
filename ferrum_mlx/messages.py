"""What an EngineClient and an engine say to each other: plain picklable messages.

Commands go in, events come out. The same ones serve an engine in a thread and in a child process.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrum_mlx.errors import FerrumError
from ferrum_mlx.executor import ModelInfo
from ferrum_mlx.metrics import KVUsage, StepStats, Timings, Usage
from ferrum_mlx.sampling import SamplingParams

ChatMessage = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Prompt = str | list[int] | list[ChatMessage]  # raw text, token ids, or a conversation to template


# Commands


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


Command = Submit | Abort | Shutdown


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
    """New output of a request; text may lag behind token_ids (split characters, stop strings)."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, after its last Delta. finish_reason: "stop", "length" or "abort"."""

    request_id: str
    finish_reason: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request by an error; finish reason "error". Its neighbours go on."""

    request_id: str
    error: FerrumError


@dataclass(frozen=True, slots=True)
class Stepped:
    stats: StepStats


@dataclass(frozen=True, slots=True)
class Died:
    """The engine is gone (a failed build, a crash, a killed process); every open request failed."""

    error: FerrumError


RequestEvent = Delta | Finished | Failed
Event = Loading | Ready | RequestEvent | Stepped | Died
