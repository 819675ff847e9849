"""Configuration to speculation: who guesses, and how two models share the memory for KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

from ferrum_mlx.config import DRAFT, DRAFT_TOKENS, EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.model_info import ModelInfo
from ferrum_mlx.speculative.draft_model import DraftModelProposer
from ferrum_mlx.speculative.ngram import NgramProposer
from ferrum_mlx.speculative.proposer import Proposer
from ferrum_mlx.speculative.speculation import Speculation

if TYPE_CHECKING:
    from ferrum_mlx.tokenizer import Tokenizer

SELF_SHARE = 4  # "self" drafts with one in so many of the layers
NO_ROLLBACK = "runs without speculation: {} carries a state, which no rejected guess can leave"


class Loaded(Protocol):
    """A model in memory, as each backend's `build.load` gives it."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def route(self) -> str: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def free_memory(self) -> int: ...
    def first_layers(self, count: int) -> Self: ...
    def executor(
        self, config: EngineConfig, narrate: Callable[[str], None], free_memory: int, share: float = 1.0
    ) -> tuple[ModelExecutor, list[str]]: ...


def build_executors(
    loaded: Loaded,
    config: EngineConfig,
    narrate: Callable[[str], None],
    load_draft: Callable[[str], Loaded],
) -> tuple[ModelExecutor, Speculation | None, list[str]]:
    """The model's executor; the speculation that config asks for, if the model can; what a user must see.

    A draft model gets such a share of the memory for KV that both hold the same number of tokens.

    Args:
        load_draft: the draft model of that name.
    """
    free, ours, kind = loaded.free_memory, config.memory_share, config.speculative
    if kind != "off" and loaded.has_state:
        executor, notes = loaded.executor(config, narrate, free, ours)
        return executor, None, [*notes, NO_ROLLBACK.format(loaded.info.model_id)]
    draft = _draft(loaded, kind, load_draft)
    if draft is None:
        executor, notes = loaded.executor(config, narrate, free, ours)
        proposer: Proposer | None = NgramProposer() if kind == "ngram" else None
    else:
        own, other = loaded.kv_bytes_per_token, draft.kv_bytes_per_token
        share = own / (own + other)
        executor, notes = loaded.executor(config, narrate, free, ours * share)
        second, more = draft.executor(_draft_config(draft, config), narrate, free, ours * (1 - share))
        _check_width(executor.info, second.info)
        notes += [f"the draft model: {note}" for note in more if note not in notes]
        notes.append(f"guesses come from {draft.info.model_id}, with {1 - share:.0%} of the memory for KV")
        proposer = DraftModelProposer(second)
    if proposer is None:
        return executor, None, notes
    most = config.draft_tokens or DRAFT_TOKENS
    rows = executor.capabilities().max_verify_rows
    if rows is not None and most >= rows:
        if config.draft_tokens:
            notes.append(f"--draft-tokens is {most}; this device verifies no more than {rows - 1} cheaply")
        most = rows - 1
    return executor, Speculation(proposer, name=kind, max_drafts=most), notes


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """A guess is a token id, so both models must mean the same by it.

    Raises:
        UsageError: they do not.
    """
    if (own := target.vocabulary) != (other := draft.vocabulary):
        apart = len(own.items() ^ other.items())
        raise UsageError(
            f"the draft model {draft_name} has another vocabulary than {target_name}: "
            f"{len(other):,} tokens beside {len(own):,}, {apart:,} of them in one alone",
            next_step="choose a draft model of the same family, or --speculative ngram",
        )


def pair_of_fakes(config: EngineConfig, make: Callable[[EngineConfig], ModelExecutor]) -> Speculation | None:
    """What config asks for without a model: a second executor like the first guesses right always."""
    if config.speculative == "off":
        return None
    proposer = NgramProposer() if config.speculative == "ngram" else DraftModelProposer(make(config))
    return Speculation(proposer, name=config.speculative, max_drafts=config.draft_tokens or DRAFT_TOKENS)


def _draft(loaded: Loaded, kind: str, load_draft: Callable[[str], Loaded]) -> Loaded | None:
    if kind == "self":
        return loaded.first_layers(max(1, loaded.info.num_layers // SELF_SHARE))
    if not kind.startswith(DRAFT):
        return None
    draft = load_draft(kind.removeprefix(DRAFT))
    if draft.has_state:
        raise UsageError(
            f"--speculative {kind}: {draft.info.model_id} carries a state, which no rejected guess can leave",
            next_step="choose a model of attention layers only, or --speculative ngram",
        )
    return draft


def _check_width(target: ModelInfo, draft: ModelInfo) -> None:
    """Heads may be padded beyond the vocabulary; a guess must be an id that the target can verify."""
    if draft.vocab_size > target.vocab_size:
        raise UsageError(
            f"the draft model {draft.model_id} gives {draft.vocab_size:,} logits",
            f"allowed: at most {target.vocab_size:,}, as many as {target.model_id} does",
            "choose another draft model, or --speculative ngram",
        )


def _draft_config(draft: Loaded, config: EngineConfig) -> EngineConfig:
    """The target's, within the draft model's own context; guesses come without adapters."""
    config = replace(config, adapters=())
    limit = draft.info.max_sequence_length
    if config.max_model_len is None or not 0 < limit < config.max_model_len:
        return config
    return replace(config, max_model_len=limit)
