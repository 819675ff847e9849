"""SamplingParams: what cannot be is refused in one line, where it enters; the rest crosses to a process."""

from __future__ import annotations

import math
import pickle
from types import MappingProxyType

import numpy as np
import pytest

from ferrum_mlx.batch import RowSampling
from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.sampling import SamplingParams, check_vocab

HUGE = 10**400


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, True, 1.5, "3"]),
        ("min_tokens", [-1, None, 0.5]),
        ("temperature", [-0.1, 100.1, math.nan, math.inf, None, "1", True]),
        ("top_p", [0, 0.0, -0.1, 1.5, math.nan, None]),
        ("top_k", [-2, 0.5, None, True]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("xtc_probability", [-0.1, 1.1, math.nan]),
        ("xtc_threshold", [-0.1, 0.51, math.nan]),
        ("repetition_penalty", [0, -1, 0.001, 101, math.nan, math.inf, None]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "0"]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("n", [0, -1, True, 16_385, None, 1.0]),
        ("seed", [-1, 2**64, 1.5, True]),
        ("logprobs", [-1, 21, True, 0.5]),
        ("prompt_logprobs", [-1, 21, HUGE]),
        ("stop", [("",), [1], 5, ["a", None]]),
        ("bad_words", ["", [b"x"], 5]),
        ("stop_token_ids", [[-1], 5, ["5"], [True], [1.0], "12"]),
        ("banned_token_ids", [[-1], {None}, 0.5]),
        ("logit_bias", [5, [(1, 2)], "x"]),
    ],
)
def test_out_of_range_is_refused_with_name_value_and_range(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(UsageError) as error:
            SamplingParams(**{field: value})
        message = str(error.value)
        assert message.startswith(f"{field} is {shown(value)}; allowed: ")
        assert "\n" not in message
        assert error.value.exit_code == 2


def test_numbers_too_large_for_a_float_are_out_of_range() -> None:
    for field in ("temperature", "min_p", "presence_penalty"):
        with pytest.raises(UsageError, match=field):
            SamplingParams(**{field: HUGE})


def test_the_edges_are_allowed() -> None:
    edges = {
        "max_tokens": (1, HUGE),
        "temperature": (0, 100),
        "top_p": (1e-9, 1),
        "top_k": (0, HUGE),
        "min_p": (0, 1),
        "xtc_threshold": (0, 0.5),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (0, 2**64 - 1),
        "logprobs": (0, 20),
        "prompt_logprobs": (0, 20),
    }
    for name, values in edges.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value
    assert SamplingParams(n=16_384, temperature=1).n == 16_384
    assert SamplingParams(xtc_probability=1, temperature=1).xtc_probability == 1
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(top_k=-1).top_k == 0  # as vLLM has it


def test_lists_texts_and_none_become_plain_tuples() -> None:
    params = SamplingParams(
        stop="x",
        bad_words=["a", "b"],
        stop_token_ids=[np.int64(3)],
        banned_token_ids=np.arange(2),
        logit_bias=None,
    )
    assert (params.stop, params.bad_words) == (("x",), ("a", "b"))
    assert (params.stop_token_ids, params.banned_token_ids) == ((3,), (0, 1))
    assert [type(token) for token in (*params.stop_token_ids, *params.banned_token_ids)] == [int] * 3
    assert params.logit_bias == {}
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()


def test_logit_bias_takes_any_mapping_and_keys_of_digits_and_keeps_a_copy() -> None:
    given = {5: 100, "7": -100.0, np.int32(9): 0.5}
    params = SamplingParams(logit_bias=MappingProxyType(given))
    given[5] = 0
    assert params.logit_bias == {5: 100.0, 7: -100.0, 9: 0.5}
    assert type(params.logit_bias) is dict
    again = pickle.loads(pickle.dumps(params))
    assert again == params


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({5: 100.5}, "token 5 is 100.5; allowed: -100 to 100"),
        ({5: math.nan}, "token 5 is nan"),
        ({5: "1"}, "token 5 is '1'"),
        ({-1: 1}, "key -1"),
        ({"five": 1}, "key 'five'"),
        ({1.0: 1}, "key 1.0"),
        ({True: 1}, "key True"),
        ({None: 1}, "key None"),
    ],
)
def test_logit_bias_says_which_entry_is_wrong(bias: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("'", ".")):
        SamplingParams(logit_bias=bias)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="min_tokens is 4; allowed: 0 to 3, max_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)
    with pytest.raises(UsageError, match=r"n is 2 at temperature 0, .*; allowed: 1; raise the temperature"):
        SamplingParams(n=2)
    with pytest.raises(UsageError, match="n is 2 at temperature 1e-06"):
        SamplingParams(n=2, temperature=1e-6)


def test_xtc_needs_a_temperature() -> None:
    with pytest.raises(UsageError, match=r"xtc_probability is 0.5 at temperature 0, .*; allowed: 0; raise"):
        SamplingParams(xtc_probability=0.5)
    assert SamplingParams(xtc_threshold=0.2).xtc_probability == 0  # off, so nothing is ignored


INTEGERS = ("max_tokens", "min_tokens", "top_k", "priority", "n", "seed", "logprobs", "prompt_logprobs")
REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def test_numpy_s_numbers_are_taken_as_python_s() -> None:
    given = {
        **{name: np.int64(1) for name in INTEGERS},
        **{name: np.float32(0.5) for name in REALS},
        "xtc_probability": np.float64(0.5),
        "xtc_threshold": np.float16(0.25),
        "logit_bias": {np.uint8(3): np.float32(-2)},
    }
    params = SamplingParams(**given)
    plain = {
        **dict.fromkeys(INTEGERS, 1),
        **dict.fromkeys(REALS, 0.5),
        "xtc_probability": 0.5,
        "xtc_threshold": 0.25,
        "logit_bias": {3: -2.0},
    }
    assert params == SamplingParams(**plain)
    assert {type(getattr(params, name)) for name in INTEGERS} == {int}
    assert {type(getattr(params, name)) for name in (*REALS, "xtc_probability", "xtc_threshold")} == {float}
    assert {type(value) for pair in params.logit_bias.items() for value in pair} == {int, float}
    for wrong in ({"max_tokens": np.float32(3)}, {"top_k": np.True_}, {"min_p": np.True_}):
        with pytest.raises(UsageError, match="allowed"):
            SamplingParams(**wrong)


def test_greedy_is_below_1e_5_and_penalties_look_back() -> None:
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().looks_back
    for params in ({"repetition_penalty": 0.9}, {"presence_penalty": -1}, {"frequency_penalty": 1}):
        assert SamplingParams(**params).penalizes
        assert SamplingParams(**params).looks_back
    words = SamplingParams(bad_words=["x"])
    assert (words.penalizes, words.looks_back) == (False, True)


@pytest.mark.parametrize("field", ["logit_bias", "banned_token_ids", "stop_token_ids"])
def test_ids_out_of_the_vocabulary_are_refused(field: str) -> None:
    def with_id(token: int) -> SamplingParams:
        return SamplingParams(**{field: {token: 1} if field == "logit_bias" else [token]})

    check_vocab(with_id(99), 100)
    with pytest.raises(UsageError, match=f"{field} has the token id 100; allowed: 0 to 99, the model's"):
        check_vocab(with_id(100), 100)


def test_something_is_left_to_sample() -> None:
    banned = SamplingParams(banned_token_ids=range(8), min_tokens=1)
    check_vocab(banned, 10, end_ids=(8, 500))
    check_vocab(banned, 10, bad_sequences=[(1, 9), (9, 3)])
    for more in ({"end_ids": (8, 9)}, {"end_ids": (8,), "bad_sequences": [(1, 9)]}):
        with pytest.raises(UsageError, match="all 10 tokens"):
            check_vocab(banned, 10, **more)
    without = SamplingParams(banned_token_ids=range(8))
    check_vocab(without, 10, end_ids=(8, 9))  # they may come from the first token on
    with pytest.raises(UsageError, match="all 8 tokens"):
        check_vocab(without, 8)
    with pytest.raises(UsageError, match=r"bad_words is .*at least one token"):
        check_vocab(SamplingParams(bad_words=["\u200b"]), 10, bad_sequences=[()])


def test_what_a_row_may_not_sample() -> None:
    params = SamplingParams(banned_token_ids=(1,), min_tokens=2, bad_words=["x"])
    row = RowSampling(params=params, end_ids=(7, 8), bad_sequences=((3,), (4, 5), (4, 4, 6)), prompt=(4, 4))
    assert row.barred == {1, 3, 7, 8}  # the prompt's 4s do not count
    assert row.at(1, (4,)).barred == {1, 3, 5, 7, 8}
    assert row.at(2, (4, 4)).barred == {1, 3, 5, 6}
    assert row.at(2, (4, 9)).barred == {1, 3}
    assert RowSampling().barred == set()
