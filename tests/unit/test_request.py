"""What a request counts of itself."""

from __future__ import annotations

from ferrum_mlx.batch import IN_FLIGHT
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams


def make() -> Request:
    return Request("r", list(range(10)), SamplingParams(), seed=0, max_tokens=4)


def test_a_replay_counts_what_was_computed_and_not_what_was_promised() -> None:
    request = make()
    request.lost_tokens = 8
    request.advance(6)
    request.advance(-3)  # the step computed a part of its chunk
    assert request.replayed_tokens == 3
    request.advance(7)
    assert (request.num_computed_tokens, request.replayed_tokens) == (10, 8)


def test_a_token_in_flight_counts_and_has_no_id() -> None:
    request = make()
    request.advance(10)
    assert not request.is_decoding
    request.in_flight = 1
    assert (request.num_tokens, request.is_decoding, request.is_at_end) == (11, True, False)
    assert request.tokens(8, 11) == (8, 9, IN_FLIGHT)
    request.output = [50, 51, 52]
    assert request.is_at_end
