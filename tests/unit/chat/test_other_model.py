"""What goes along to another model, and what stays behind."""

from __future__ import annotations

import pytest

from ferrum_mlx.chat.other_model import for_model
from ferrum_mlx.config import EngineConfig


@pytest.mark.parametrize(
    ("draft", "model", "goes"),
    [
        ("smollm2-135m", "smollm2-360m", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-360m", True),
        ("smollm2-135m", "smollm2-1.7b", True),  # the same
        ("some/draft", "smollm2-1.7b", True),
        ("some/draft", "smollm2-360m", False),
        ("smollm2-135m", "smollm2-135m", False),
        ("smollm2-135m", "qwen3-1.7b", False),
        ("smollm2-135m", "./own.gguf", False),
    ],
)
def test_a_draft(draft: str, model: str, goes: bool) -> None:
    config = EngineConfig(model="smollm2-1.7b", speculative=f"draft:{draft}", draft_tokens=3, kv_memory=99)
    found, behind = for_model(config, model)
    assert (found.model, found.kv_memory) == (model, 99)
    assert (found.speculative, found.draft_tokens) == ((config.speculative, 3) if goes else ("off", None))
    assert [draft in line for line in behind] == ([] if goes else [True])


def test_what_needs_no_other_model_goes_along() -> None:
    found, behind = for_model(EngineConfig(speculative="ngram", draft_tokens=3), "qwen3-0.6b")
    assert (found.speculative, found.draft_tokens, behind) == ("ngram", 3, [])


def test_adapters_stay_behind() -> None:
    found, behind = for_model(EngineConfig(adapters=(("a", "."),)), "qwen3-0.6b")
    assert found.adapters == ()
    assert behind == ["the adapters are those of the model before, and stay behind"]
