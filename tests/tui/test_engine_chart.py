"""Charts from zero, and the rates that they show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_tui.engine.chart import bars, ceiling, chart, sparkline
from ferrum_tui.engine.history import SPAN, History, Sample


@pytest.mark.parametrize(
    ("most", "top"),
    [(0, 1), (0.3, 0.3), (1, 1), (1.2, 1.5), (9, 10), (50.2, 60), (61, 80), (100, 100), (1842, 2000)],
)
def test_the_scale_ends_at_a_round_number(most: float, top: float) -> None:
    assert ceiling([0.0, most]) == pytest.approx(top)


@given(st.lists(st.floats(0, 1e7, allow_subnormal=False), min_size=1))
def test_no_value_is_above_the_scale(values: list[float]) -> None:
    top = ceiling(values)
    assert max(values) <= top * (1 + 1e-6)
    assert top <= 2 * max(values) or max(values) == 0 or top < 2e-6


def test_what_hardly_changes_is_flat_near_the_top() -> None:
    values = [49.8, 50.2, 50.0, 49.9, 50.1]
    lines = [line.plain for line in chart(lambda _: values, 80, 3)]
    assert lines == ["   60┤▄▄▄▄▄", "     │█████", "     │█████", "    0┴ last 60 s"]
    assert sparkline(lambda _: values, 11).plain == "   60┤▇▇▇▇▇"


def test_what_changes_is_not_flat() -> None:
    assert bars([0, 10, 25, 50, 0.1], 1, 50) == [" ▂▄█▁"]
    assert bars([0, 10, 25, 50], 2, 50) == ["   █", " ▃██"]


def test_a_chart_is_as_wide_as_asked() -> None:
    for width in (8, 20, 44):
        lines = chart(lambda count: [1.0] * count, width, 3, 100.0, "%")
        assert {line.cell_length for line in lines[:-1]} == {width}


def steady(rate: float, seconds: float, start: float = 0.0, step: float = 0.25) -> History:
    history = History()
    for i in range(int(seconds / step) + 1):
        time = start + i * step
        history.add(Sample(time, int(rate * (time - start)), 0, 0.5, True))
    return history


def test_rates_of_a_steady_engine() -> None:
    history = steady(50, 70)
    assert history.now_tps == pytest.approx(50, rel=0.03)
    assert history.average_tps == pytest.approx(50, rel=0.01)
    assert history.decode_rates(30) == pytest.approx([50] * 30, rel=0.03)
    assert history.samples[-1].time - history.samples[0].time <= SPAN + 0.5


def test_pauses_count_as_pauses_and_not_in_the_average() -> None:
    """Nothing is sampled while the engine is idle."""
    history = History()
    for i in range(9):
        history.add(Sample(i * 0.25, i * 10, 0, 0.5, i < 8))
    for i in range(9):
        history.add(Sample(32 + i * 0.25, 80 + i * 10, 0, 0.5, i < 8))
    rates = history.decode_rates(60)  # a second each
    assert [round(rate) for rate in rates if rate > 1] == pytest.approx([40] * 4, abs=12)
    assert sum(rates) == pytest.approx(160, abs=1)
    assert history.average_tps == pytest.approx(40, rel=0.06)


def test_tokens_of_a_long_step_are_spread_over_it() -> None:
    history = History()
    history.add(Sample(0, 0, 0, 0, True))
    history.add(Sample(4, 0, 400, 0, True))
    assert history.prefill_rates(60)[-4:] == pytest.approx([100] * 4)


def test_samples_are_not_kept_closer_than_five_a_second() -> None:
    history = steady(1000, 10, step=0.01)
    assert len(history.samples) <= 10 / 0.19 + 2
    assert history.samples[-1].decoded == 10_000


def test_no_samples_no_rates() -> None:
    history = History()
    assert (history.now_tps, history.average_tps) == (0.0, 0.0)
    assert history.decode_rates(3) == history.prefill_rates(3) == history.kv_shares(3) == [0.0] * 3
