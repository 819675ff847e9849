"""What a user may set about an engine, checked once, where it enters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.plain import whole

BACKENDS = ("auto", "mlx", "torch", "fake")
NUMERICS = ("exact", "fast")
KV_BITS = (8, 4)
SPECULATIVE = ("off", "ngram", "self")  # or DRAFT and a model
DRAFT = "draft:"
DRAFT_TOKENS = 16  # guesses of a request in a step, unless --draft-tokens says otherwise
BASE = "none"  # stands for the model without an adapter, where a name must be typed
LOAD_ADAPTER = "--adapter NAME=FOLDER loads one"
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
        kv_bits: of a number in the KV pools, one of KV_BITS; None is the model's own dtype.
        memory_share: of the memory for KV that this engine would have alone, for who runs several: of what
            is free when it loads, or of kv_memory.
        max_model_len: longest sequence (prompt + output) in tokens; None takes the smaller of
            the model's own limit and DEFAULT_CONTEXT.
        block_size: tokens a KV block.
        max_num_batched_tokens: token budget of one step.
        max_prefill_chunk: most prompt tokens of one request in a step.
        max_num_seqs: requests running at once.
        prefix_cache: keep the KV of past tokens for prompts that begin with the same ones.
        prefill_while_decoding: most prompt tokens of a step in which anything decodes; None is the
            device's own figure. More admits long prompts sooner, and makes running streams wait longer.
        speculative: who guesses tokens ahead for the model to verify, several a step: "ngram" looks them up
            in the request's own tokens, "draft:MODEL" asks a smaller model of the same vocabulary, "self"
            the model's own first layers. The output is that of "off".
        draft_tokens: most guesses of a request in a step, fewer where they do not pay; None is
            DRAFT_TOKENS.
        adapters: LoRA adapters to load with the model, as (name, folder) pairs or a dict; a request
            chooses one by its name.
        events: a file to append one JSON line a step and a request's transition to; "" is none.
        offline: never touch the network.
    """

    model: str = ""
    backend: str = "auto"
    numerics: str = "fast"
    device: str = ""
    kv_memory: int | None = None
    kv_bits: int | None = None
    memory_share: float = 1.0
    max_model_len: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 512
    max_num_seqs: int = 64
    prefix_cache: bool = True
    prefill_while_decoding: int | None = None
    speculative: str = "off"
    draft_tokens: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    events: str = ""
    offline: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", fspath(self.model))
        if not isinstance(self.model, str):
            raise UsageError(
                f"model is {shown(self.model)}", "allowed: a text or a path", "see ferrum-mlx models list"
            )
        _one_of("backend", self.backend, BACKENDS)
        _one_of("numerics", self.numerics, NUMERICS)
        _one_of("device", self.device, ("", "cpu", "gpu"))
        if not isinstance(self.memory_share, (int, float)) or not 0 < self.memory_share <= 1:
            raise UsageError(f"memory_share is {shown(self.memory_share)}", "allowed: above 0, up to 1")
        for name in ("prefix_cache", "offline"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} is {shown(value)}", "allowed: True or False")
        if not isinstance(self.events, str):
            raise UsageError(f"events is {shown(self.events)}", "allowed: the path of a file, as a text")
        for name, least, unit in _COUNTS:
            object.__setattr__(self, name, _at_least(least, name, getattr(self, name), unit))
        for name, least, unit in _COUNTS_OR_NONE:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _at_least(least, name, value, unit))
        if self.kv_bits is not None:
            object.__setattr__(self, "kv_bits", _kv_bits(self.kv_bits))
        _check_speculative(self.speculative)
        object.__setattr__(self, "adapters", _adapters(self.adapters))
        if self.draft_tokens is not None and self.speculative == "off":
            raise UsageError(
                f"draft_tokens is {self.draft_tokens}, and nothing drafts",
                next_step="add --speculative ngram, or leave --draft-tokens away",
            )

    @property
    def draft_model(self) -> str:
        """The model that guesses; "" where none of its own does."""
        return self.speculative.removeprefix(DRAFT) if self.speculative.startswith(DRAFT) else ""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.adapters)


# (field, least, unit)
_COUNTS = (
    ("block_size", 1, ""),
    ("max_prefill_chunk", 1, ""),
    ("max_num_seqs", 1, ""),
    ("max_num_batched_tokens", 8, ""),  # the load-time check's step
)
_COUNTS_OR_NONE = (
    ("kv_memory", 1, "bytes, "),
    ("prefill_while_decoding", 1, "tokens, "),
    ("draft_tokens", 1, ""),
    ("max_model_len", 16, ""),
)
_MOST = 2**63 - 1  # more than any machine holds of anything


def _kv_bits(value: object) -> int:
    with suppress(TypeError):
        if (bits := whole(value)) in KV_BITS:
            return bits
    raise UsageError(f"kv_bits is {shown(value)}", "allowed: 8, 4, or None for the model's own dtype")


def _check_speculative(value: object) -> None:
    if value in SPECULATIVE:
        return
    if not isinstance(value, str) or not value.startswith(DRAFT) or value == DRAFT:
        choices = ", ".join(map(repr, SPECULATIVE))
        raise UsageError(f"speculative is {shown(value)}", f"allowed: {choices}, or '{DRAFT}MODEL'")


def _adapters(value: object) -> tuple[tuple[str, str], ...]:
    """As pairs of texts, each name once, each folder there."""
    given = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(name, fspath(folder)) for name, folder in given]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageError(
            f"adapters is {shown(value)}", "allowed: pairs of a name and a folder, or a dict of them"
        ) from None
    names = [name for name, _ in pairs]
    for name, folder in pairs:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name) or name == BASE:
            raise UsageError(
                f"an adapter's name is {shown(name)}",
                f"allowed: letters, digits and . _ + -, and not {BASE!r}, which is the model without one",
            )
        if names.count(name) > 1:
            raise UsageError(f"two adapters are named {shown(name)}", "allowed: each name once")
        if not isinstance(folder, str) or not folder or not Path(folder).expanduser().is_dir():
            raise UsageError(
                f"there is no folder {shown(folder)} for the adapter {shown(name)}",
                next_step="give the folder that PEFT or mlx-lm saved the adapter in",
            )
    return tuple((name, str(Path(folder).expanduser())) for name, folder in pairs)


def check_adapter(name: object, loaded: Sequence[str]) -> str:
    """The name of a request's adapter; "" is the model without one.

    Raises:
        UsageError: no adapter of that name is loaded.
    """
    if name in (None, ""):
        return ""
    if not isinstance(name, str) or name not in loaded:
        allowed = f"allowed: {', '.join(loaded)}, or none at all" if loaded else "no adapter is loaded"
        raise UsageError(f"the adapter is {shown(name)}", allowed, LOAD_ADAPTER)
    return name


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed if a)
        raise UsageError(f"{name} is {shown(value)}", f"allowed: {choices}")


def _at_least(least: int, name: str, value: object, unit: str) -> int:
    """The value as a plain int."""
    try:
        given = whole(value)
    except TypeError:
        given = -1
    if not least <= given <= _MOST:
        raise UsageError(
            f"{name} is {shown(value)}", f"allowed: {unit}a whole number of at least {least}, below 2^63"
        )
    return given
