"""Settings and errors: what cannot be is refused in one line, where it enters."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from ferrum_mlx import errors
from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError, shown


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


def test_numpy_s_whole_numbers_become_plain_ones() -> None:
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_memory", "max_model_len")
    config = EngineConfig(**{name: np.int32(64) for name in names})
    assert [getattr(config, name) for name in names] == [64] * len(names)
    assert {type(getattr(config, name)) for name in names} == {int}
    for wrong in (np.float32(64), np.True_, True, 2**63, 10**5000):
        with pytest.raises(UsageError, match=r"kv_memory is .*; allowed: bytes, a whole number"):
            EngineConfig(kv_memory=wrong)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (None, "None"),
        (["a\nb"], "['a\\nb']"),
        (10**5000, "a value of type int"),
        (np.zeros((2, 2)), "array([[0., 0.],        [0., 0.]])"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_in_a_message_is_its_repr_on_one_line(value: object, text: str) -> None:
    assert shown(value) == text


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError


MILLION = 10**6


@pytest.mark.parametrize(
    "value",
    [
        "x" * MILLION,
        b"x" * MILLION,
        list(range(MILLION)),
        {str(i): "y" * 1000 for i in range(1000)},
        [["z" * MILLION] * 100] * 100,
        10**4000,
        Path("p" * MILLION),
        Mute(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_long_value_is_cut_in_the_middle(value: object) -> None:
    text = shown(value)
    assert len(text) <= 203
    assert "\n" not in text
    with pytest.raises(UsageError) as caught:
        EngineConfig(backend=value)
    assert len(str(caught.value)) < 300
    assert text in str(caught.value)


def test_every_error_survives_a_pickle() -> None:
    tree = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, FerrumError)]
    assert len(tree) > 10
    for cls in tree:
        error = CapacityError(3, 1) if cls is CapacityError else cls("what", "allowed: x", "do y")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert str(again) == str(error)
        assert cls.exit_code == (2 if issubclass(cls, UsageError) else 1)


def test_bits_of_kv_are_eight_or_four() -> None:
    kept = [EngineConfig(kv_bits=bits).kv_bits for bits in (None, 8, 4, np.int64(8))]
    assert kept == [None, 8, 4, 8]
    assert type(kept[3]) is int
    for wrong in (0, 2, 16, 8.0, "8", True, np.zeros(2)):
        with pytest.raises(UsageError, match=r"kv_bits is .*; allowed: 8, 4, or None"):
            EngineConfig(kv_bits=wrong)


def test_the_fake_backend_has_no_kv_to_quantize() -> None:
    with pytest.raises(UsageError, match="--kv-bits is 8, and the KV of the fake backend is token ids"):
        FakeExecutor(EngineConfig(kv_bits=8))
