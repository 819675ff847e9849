"""The price of rows, as steps teach it."""

from __future__ import annotations

import itertools

import pytest

from ferrum_mlx.speculative.cost import LEAST_PLAIN, PATIENCE, REFRESH, SOUND, WINDOW, StepCost


def learned(sequences: int = 1, **seconds: float) -> StepCost:
    """From sound measurements: learned(r1=1.0, r9=2.0)."""
    cost = StepCost(sequences)
    for name, value in seconds.items():
        for _ in range(SOUND):
            cost.add(int(name[1:]), value)
    return cost


def test_what_is_measured_is_known_and_between_is_a_line() -> None:
    cost = learned(r1=1.0, r3=2.0, r11=4.0)
    assert [cost.seconds(rows) for rows in (1, 3, 7, 11)] == [1.0, 2.0, 3.0, 4.0]


def test_the_first_draft_is_no_part_of_a_line() -> None:
    """A product of two rows may cost what one of nine does, and several times what one of one row does."""
    cost = learned(r1=1.0, r9=3.0)
    assert cost.seconds(2) > 2.0


def test_more_rows_never_cost_less() -> None:
    cost = learned(r1=1.0, r5=9.0, r9=3.0)
    seconds = [cost.seconds(rows) for rows in range(1, 20)]
    assert seconds == sorted(seconds)
    assert cost.seconds(5) == 3.0


def test_disturbed_steps_do_not_count() -> None:
    cost = StepCost(1)
    for i in range(WINDOW):
        cost.add(1, 1.0 if i % 2 else 5.0)
        cost.add(9, 2.0 if i % 2 else 50.0)
    assert (cost.plain, cost.seconds(9)) == (1.0, 2.0)


def test_a_change_of_the_machine_is_followed() -> None:
    cost = learned(r1=1.0, r5=2.0)
    for _ in range(WINDOW):
        cost.add(1, 3.0)
        cost.add(5, 6.0)
    assert (cost.plain, cost.seconds(5)) == (3.0, 6.0)


def test_a_single_measurement_is_doubted_and_then_made_again() -> None:
    cost = learned(r1=1.0)
    cost.add(5, 40.0)
    assert cost.seconds(5) == 5.0  # no more than five steps
    for _ in range(PATIENCE + 1):
        cost.add(1, 1.0)
    assert cost.seconds(5) < 2.5


def test_sound_measurements_are_believed_whatever_they_say() -> None:
    assert learned(r8=1.0, r9=30.0, sequences=8).seconds(9) == 30.0


def test_steps_without_drafts_come_first_and_again() -> None:
    cost = StepCost(2)
    for _ in range(LEAST_PLAIN):
        assert cost.needs_plain
        cost.add(2, 1.0)
    for _ in range(REFRESH):
        assert not cost.needs_plain
        cost.add(5, 1.0)
    assert cost.needs_plain


@pytest.mark.parametrize("sequences", [1, 8])
def test_nothing_known_is_a_guess_that_rises(sequences: int) -> None:
    seconds = [StepCost(sequences).seconds(rows) for rows in range(sequences, 40)]
    assert seconds[0] == 1.0
    assert all(a < b for a, b in itertools.pairwise(seconds))
