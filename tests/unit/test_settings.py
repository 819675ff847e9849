"""Settings and errors: what cannot be is refused in one line, where it enters."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ferrum_mlx import errors
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError


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
