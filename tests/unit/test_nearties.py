"""The rule that tells rounding from a fault, on made-up logits."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_mlx.nearties import Fault, NearTie, compare, difference, faults, tolerance

PROMPT = [4, 2]


def judge(gap: float, delta: float) -> NearTie | Fault | None:
    """The reference prefers 0 to 1 by `gap`; ours differs by `delta`, in favour of 1."""
    asked: list[list[int]] = []

    def theirs(ids: list[int]) -> np.ndarray:
        asked.append(ids)
        return np.array([1.0, 1.0 - gap, 0.0], dtype=np.float32)

    def ours(ids: list[int]) -> np.ndarray:
        asked.append(ids)
        return np.array([1.0, 1.0 - gap + delta, 0.0], dtype=np.float32)

    found = compare(PROMPT, [2, 1, 0], [2, 0, 2], ours, theirs)
    assert asked == [[4, 2, 2]] * 2  # both at the step that differs
    assert found is not None
    assert (found.step, found.ours, found.theirs) == (1, 1, 0)
    assert found.gap == pytest.approx(gap, abs=1e-6)
    assert found.delta == pytest.approx(delta, abs=1e-6)
    return found


def test_equal_outputs_ask_for_no_logits() -> None:
    assert compare(PROMPT, [1, 2], [1, 2], pytest.fail, pytest.fail) is None


@pytest.mark.parametrize(
    ("gap", "delta", "kind"),
    [
        (1e-4, 9e-5, NearTie),
        (1e-4, 4e-5, Fault),  # rounding of 4e-5 a logit cannot turn 1e-4 over
        (9e-4, 8e-4, NearTie),
        (1.2e-3, 9e-4, Fault),  # under 2 · delta, but past the limit
        (1e-4, 2e-3, Fault),  # the logits differ too much, however close the two ids
        (1.0, 1.5, Fault),
        (0.1, 0.0, Fault),  # equal logits: one of the two did not take the likeliest
        (float("nan"), 9e-5, Fault),
    ],
)
def test_rule(gap: float, delta: float, kind: type) -> None:
    if np.isnan(gap):
        row = np.array([np.nan, 0.0], dtype=np.float32)
        assert isinstance(compare([0], [1], [0], lambda _: row, lambda _: row), Fault)
        return
    found = judge(gap, delta)
    assert type(found) is kind
    assert f"{found.gap:.3g}" in str(found)
    assert f"{found.delta:.3g}" in str(found)


def test_sixteen_bits_round_more_coarsely() -> None:
    theirs = np.array([20.0, 19.0, 0.0], dtype=np.float32)
    ours = theirs + np.array([0.0, 1.5, 0.0], dtype=np.float32)

    def judged(dtype: str) -> object:
        return type(compare([0], [1], [0], lambda _: ours, lambda _: theirs, dtype))

    assert [judged(dtype) for dtype in ("bfloat16", "float16", "float32")] == [NearTie, Fault, Fault]


def test_what_is_no_16_bit_type_is_held_to_float32s_share() -> None:
    shares = [tolerance(dtype) for dtype in ("float32", "float64", "float16", "bfloat16")]
    assert shares == [1e-3, 1e-3, 3e-2, 1e-1]


def test_equal_bans_are_no_difference() -> None:
    banned = np.array([1.0, -np.inf], dtype=np.float32)
    assert difference(banned, banned) == 0.0
    assert difference(banned, np.array([1.5, -np.inf], dtype=np.float32)) == 0.5
    assert difference(banned, np.array([1.0, 0.0], dtype=np.float32)) == np.inf
    assert np.isnan(difference(banned, np.array([np.nan, -np.inf], dtype=np.float32)))


def test_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="outputs of 2 and 1 ids"):
        compare(PROMPT, [1, 2], [1], pytest.fail, pytest.fail)


def test_at_most_one_near_tie_in_ten() -> None:
    tie, fault = NearTie(0, 1, 2, 1e-5, 1e-5), Fault(3, 1, 2, 0.5, 0.1)
    assert faults([None] * 9 + [tie]) == []
    assert len(faults([None] * 8 + [tie])) == 1
    assert len(faults([None] * 18 + [tie, tie])) == 0
    assert len(faults([None] * 17 + [tie, tie])) == 1
    assert faults([None] * 9 + [fault]) == [f"prompt 9: {fault}"]
