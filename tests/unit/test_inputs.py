"""What LLM takes: one form of each input, and one line for what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.inputs import as_conversations, as_prompts, with_params
from ferrum_mlx.intake import Intake
from ferrum_mlx.llm import LLM
from ferrum_mlx.messages import Submit
from ferrum_mlx.sampling import SamplingParams


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", [3]], ["a", [3]]),
        ([np.int64(1), np.uint8(2)], [[1, 2]]),
        ([[np.int32(1)], range(2)], [[1], [0, 1]]),
        ([], []),
    ],
)
def test_prompts(given: object, prompts: list[object]) -> None:
    assert as_prompts(given) == prompts
    assert {type(part) for prompt in as_prompts(given) for part in prompt} <= {int, str}


@pytest.mark.parametrize("wrong", [[True], [[1, False]], [1.0], [np.float32(1)], [None], 5, b"ids", [b"ids"]])
def test_what_is_no_prompt(wrong: object) -> None:
    with pytest.raises(UsageError, match="allowed: a text"):
        as_prompts(wrong)


def test_a_wrong_value_of_a_megabyte_makes_a_short_line() -> None:
    calls = (
        lambda: as_prompts([["x" * 10**6]]),
        lambda: as_conversations([["x" * 10**6] * 10]),
        lambda: with_params(["a"], ["x" * 10**6]),
    )
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert len(str(caught.value)) < 400


def test_numpy_s_ids_give_what_plain_ones_give() -> None:
    ids = list(b"hello")
    with LLM(backend="fake", max_model_len=np.int64(64)) as llm:
        plain, same = llm.generate([ids, [np.int16(token) for token in ids]], SamplingParams(max_tokens=4))
    assert plain.token_ids == same.token_ids
    assert plain.usage == same.usage


def test_the_engine_takes_and_refuses_the_same() -> None:
    config = EngineConfig()
    intake = Intake(None, vocab_size=100, kv_capacity=config.block_size)
    assert intake._encode([np.int64(99), 0], None) == [99, 0]
    for wrong in ([100], [-1], [True], [1.0]):
        with pytest.raises(UsageError, match="whole numbers from 0 to 99"):
            intake.take(Submit("x", wrong, SamplingParams()), 0.0)
