"""Bytes as people read them."""

from __future__ import annotations

import re

import pytest

from ferrum_mlx.plain import size


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (5, "5 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (46_080, "46.1 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_400, "999 kB"),
        (999_500, "1.0 MB"),  # not 1000 kB
        (538_000_000, "538 MB"),
        (999_700_000, "1.0 GB"),
        (4_608_000_000, "4.6 GB"),
        (999_999_999_999, "1.0 TB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_a_size(count: int, said: str) -> None:
    assert size(count) == said


def test_at_most_three_digits_and_never_far_from_the_count() -> None:
    units = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
    for exponent in range(1, 11):
        for step in range(100):
            count = 10**exponent + step * 10**exponent // 11
            number, unit = size(count).split()
            assert re.fullmatch(r"\d{1,3}|\d{1,2}\.\d", number)
            assert abs(float(number) * units[unit] - count) <= 0.05 * count
