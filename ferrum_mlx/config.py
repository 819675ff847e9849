"""What a user may set about an engine, checked once, where it enters."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

from ferrum_mlx.errors import UsageError

BACKENDS = ("auto", "mlx", "torch", "fake")
NUMERICS = ("exact", "fast")
DEFAULT_CONTEXT = 4096  # tokens a request may hold unless --max-model-len says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; picklable, so that it can cross to a child process.

    Attributes:
        model: catalogue alias, hub repository id, folder, or .gguf file; "" is the default model.
        backend: one of BACKENDS.
        numerics: "exact" takes one matmul route whatever the number of rows; "fast" may round
            differently by shape.
        device: "" for the backend's own choice, else "cpu" or "gpu".
        kv_memory: bytes for the KV pools; None sizes them from measured free memory.
        max_model_len: longest sequence (prompt + output) in tokens; None takes the smaller of
            the model's own limit and DEFAULT_CONTEXT.
        block_size: tokens a KV block.
        max_num_batched_tokens: token budget of one step.
        max_prefill_chunk: most prompt tokens of one request in a step.
        max_num_seqs: requests running at once.
        prefix_cache: keep the KV of past tokens for prompts that begin with the same ones.
        prefill_while_decoding: most prompt tokens of a step in which anything decodes; None is the
            device's own figure. More admits long prompts sooner, and makes running streams wait longer.
        events: a file to append one JSON line a step and a request's transition to; "" is none.
        offline: never touch the network.
    """

    model: str = ""
    backend: str = "auto"
    numerics: str = "fast"
    device: str = ""
    kv_memory: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 512
    max_num_seqs: int = 64
    prefix_cache: bool = True
    prefill_while_decoding: int | None = None
    events: str = ""
    offline: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", fspath(self.model))
        if not isinstance(self.model, str):
            raise UsageError(
                f"model is {self.model!r}", "allowed: a text or a path", "see ferrum-mlx models list"
            )
        _one_of("backend", self.backend, BACKENDS)
        _one_of("numerics", self.numerics, NUMERICS)
        _one_of("device", self.device, ("", "cpu", "gpu"))
        for name in ("prefix_cache", "offline"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} is {value!r}", "allowed: True or False")
        if not isinstance(self.events, str):
            raise UsageError(f"events is {self.events!r}", "allowed: the path of a file, as a text")
        for name in ("block_size", "max_prefill_chunk", "max_num_seqs"):
            _at_least(1, name, getattr(self, name))
        _at_least(8, "max_num_batched_tokens", self.max_num_batched_tokens)  # the load-time check's step
        if self.kv_memory is not None:
            _at_least(1, "kv_memory", self.kv_memory, "bytes, ")
        if self.prefill_while_decoding is not None:
            _at_least(1, "prefill_while_decoding", self.prefill_while_decoding, "tokens, ")
        if self.max_model_len is not None:
            _at_least(16, "max_model_len", self.max_model_len)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed if a)
        raise UsageError(f"{name} is {value!r}", f"allowed: {choices}")


def _at_least(least: int, name: str, value: object, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}", f"allowed: {unit}a whole number of at least {least}")
