"""Settings and errors: what cannot be is refused in one line, where it enters."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest

from ferrum_mlx import errors
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError
from ferrum_mlx.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
    ],
)
def test_sampling_refuses_with_name_value_and_range(field: str, value: object) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field} is {value!r}; allowed: ")
    assert "\n" not in message
    assert error.value.exit_code == 2


def test_sampling_accepts_the_edges() -> None:
    params = SamplingParams(max_tokens=1, temperature=100, top_p=1, top_k=0, seed=2**64 - 1, stop="x")
    assert params.stop == ("x",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "cuda"),
        ("numerics", ""),
        ("device", "tpu"),
        ("block_size", 0),
        ("kv_memory", 0),
        ("max_num_seqs", 1.5),
    ],
)
def test_config_refuses_with_name_value_and_choices(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{field} is {value!r}; allowed: "):
        EngineConfig(**{field: value})


def test_a_path_is_a_model_and_a_number_is_none(tmp_path: Path) -> None:
    assert EngineConfig(model=tmp_path).model == str(tmp_path)
    for wrong in (5, None, b"x"):
        with pytest.raises(UsageError, match="model is"):
            EngineConfig(model=wrong)
    with pytest.raises(UsageError, match="allowed: bytes, a whole number"):
        EngineConfig(kv_memory="1GB")


def test_every_error_survives_a_pickle() -> None:
    tree = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, FerrumError)]
    assert len(tree) > 10
    for cls in tree:
        error = CapacityError(3, 1) if cls is CapacityError else cls("what", "allowed: x", "do y")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert str(again) == str(error)
        assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)
