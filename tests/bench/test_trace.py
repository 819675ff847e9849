"""The definitions of the figures, on moments written down by hand."""

from __future__ import annotations

import pytest

from ferrum_mlx.bench.trace import (
    Stream,
    Trace,
    admission_figures,
    decode_figures,
    load_figures,
    percentile,
    prefill_figures,
)
from ferrum_mlx.errors import FerrumError


def stream(arrived: float, *times: float, prompt: int = 10, cached: int = 0, **more: bool) -> Stream:
    ids = list(range(len(times)))
    return Stream("s", [0] * prompt, arrived, list(times), ids, cached_tokens=cached, **more)


def test_n_tokens_are_n_minus_1_behind_the_first() -> None:
    figures = decode_figures(Trace([stream(0.0, 5.0, 5.5, 6.0, 7.0)]))
    assert figures["decode_tps"] == 3 / 2.0  # not 4 of them, and not from the arrival on
    assert "prefill_tps" not in figures
    assert "output_tps" not in figures


def test_prefill_counts_what_no_cache_had_up_to_the_last_first_token() -> None:
    figures = prefill_figures(Trace([stream(1.0, 3.0, prompt=100), stream(1.0, 6.0, prompt=50, cached=32)]))
    assert figures == {"ttft_s": (2.0 + 5.0) / 2, "prefill_tps": 118 / 5.0, "cached_tokens": 32}


def test_those_that_prepare_are_not_measured() -> None:
    before = stream(0.0, 1.0, prompt=1000, measured=False)
    assert prefill_figures(Trace([before, stream(1.0, 2.0, prompt=100)]))["prefill_tps"] == 100.0


def test_several_streams_are_measured_while_all_of_them_decode() -> None:
    """From 4.0, when the second has its first token, to 8.0, when the first ends."""
    early = stream(0.0, 1.0, 2.0, 4.0, 6.0, 8.0)
    late = stream(0.0, 4.0, 6.0, 8.0, 10.0)
    figures = decode_figures(Trace([early, late]))
    assert figures["decode_tps"] == 4 / 4.0
    assert figures["output_tps"] == 9 / 10.0
    assert figures["itl_p50_s"] == figures["itl_p99_s"] == 2.0  # the gap of 1.0 lies before


def test_tokens_that_come_together_all_count() -> None:
    figures = decode_figures(Trace([stream(0.0, 1.0, 1.0, 2.0, 2.0, 2.0)], drafts=2, drafted=8, accepted=3))
    assert figures["decode_tps"] == 4.0
    assert (figures["acceptance_rate"], figures["acceptance_length"]) == (3 / 8, 2.5)


def test_what_no_forward_took_is_the_engine_s_own() -> None:
    figures = decode_figures(Trace([stream(0.0, 1.0, 2.0)], step_s=4.0, forward_s=3.0))
    assert figures["outside_forward"] == 0.25


def test_what_cannot_be_said_is_absent() -> None:
    assert decode_figures(Trace([stream(0.0, 1.0)])) == {}
    apart = [stream(0.0, 1.0, 2.0), stream(0.0, 3.0, 4.0)]
    assert "decode_tps" not in decode_figures(Trace(apart))  # never both at once


def test_a_load_is_measured_from_first_arrival_to_last_token() -> None:
    figures = load_figures(Trace([stream(1.0, 2.0, 3.0), stream(2.0, 5.0, 6.0, cached=4)]))
    assert figures["output_tps"] == 4 / 5.0
    assert (figures["ttft_s"], figures["cached_tokens"]) == (2.0, 4)


def test_gaps_are_told_apart_by_the_arrival_of_the_long_prompt() -> None:
    one = stream(0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.2, 20.0)
    two = stream(0.0, 1.5, 2.5, 3.5, 9.5, 10.0)
    long = stream(4.0, 9.0, 9.5, prompt=500, intrudes=True)
    figures = admission_figures(Trace([one, two, long]))
    assert figures["quiet_gap_s"] == 1.0
    assert figures["longest_gap_s"] == 6.0  # 3.5 to 9.5; a longer one begins behind the first token
    assert (figures["gap_ratio"], figures["ttft_s"], figures["prefill_tps"]) == (6.0, 5.0, 100.0)


def test_an_admission_that_never_was_is_an_error() -> None:
    with pytest.raises(FerrumError, match="ended before the long prompt was in"):
        admission_figures(Trace([stream(0.0, 1.0, 2.0), stream(1.5, intrudes=True)]))


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (90, 9), (99, 10), (1, 1)])
def test_percentiles_are_by_nearest_rank(percent: int, value: float) -> None:
    assert percentile(list(range(1, 11)), percent) == value


def test_streams_that_never_began_are_an_error() -> None:
    with pytest.raises(FerrumError, match="only 1 of 2 streams had begun"):
        decode_figures(Trace([stream(0.0, 1.0, 2.0), stream(0.0)]))
