"""An engine's settings for another model, without what belongs to the model before."""

from __future__ import annotations

from dataclasses import replace

from ferrum_mlx.catalog import find_card
from ferrum_mlx.config import EngineConfig


def for_model(config: EngineConfig, model: str) -> tuple[EngineConfig, list[str]]:
    """The settings, and what stays behind, a line each.

    Adapters do, and a draft model, which has the vocabulary of the model before: unless it is the same
    model, or the catalogue pairs that draft with it.
    """
    behind = []
    if config.adapters:
        behind.append("the adapters are those of the model before, and stay behind")
    if config.draft_model and not _has_draft(model, config):
        behind.append(f"{config.draft_model} drafts for the model before, and stays behind")
        config = replace(config, speculative="off", draft_tokens=None)
    return replace(config, model=model, adapters=()), behind


def _has_draft(model: str, config: EngineConfig) -> bool:
    card, draft = find_card(model), find_card(config.draft_model)
    paired = card is not None and draft is not None and card.draft == draft.alias
    return paired or model == config.model
