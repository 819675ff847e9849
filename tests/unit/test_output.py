"""Numbers of a request, on a clock that the test holds."""

from __future__ import annotations

import pytest

from ferrum_mlx.backends.fake import EOS, FakeCodec
from ferrum_mlx.metrics import Timings, Usage
from ferrum_mlx.output import OutputStream
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams


def stream(prompt: int = 30, cached: int = 0, **params: object) -> OutputStream:
    request = Request(
        "r", [1] * prompt, SamplingParams(**params), seed=0, max_tokens=10, num_cached_tokens=cached
    )
    return OutputStream(request, FakeCodec(), arrived=100.0)


def test_ttft_prefill_and_decode_are_apart() -> None:
    out = stream(prompt=30, cached=10)
    out.scheduled(102.0)
    out.scheduled(103.0)  # a second chunk: prefill started at 102
    for now in (104.0, 104.5, 106.0):
        out.add(ord("x"), now)
    assert out.timings() == Timings(ttft_s=4.0, prefill_tps=10.0, decode_tps=1.0)
    assert out.usage() == Usage(prompt_tokens=30, completion_tokens=3, cached_tokens=10)


def test_one_token_has_no_decode_speed_and_none_has_no_times() -> None:
    out = stream()
    assert out.timings() == Timings(0.0, 0.0, 0.0)
    out.scheduled(101.0)
    out.add(ord("x"), 102.0)
    assert out.timings() == Timings(ttft_s=2.0, prefill_tps=30.0, decode_tps=0.0)


@pytest.mark.parametrize(
    ("tokens", "params", "text", "reason"),
    [
        (b"abcdefghijk"[:10], {}, "abcdefghij", "length"),
        ([*b"ab", EOS], {}, "ab", "stop"),
        (b"ab#cd", {"stop": ("cd",)}, "ab#", "stop"),
    ],
)
def test_text_and_reason(tokens: bytes, params: dict[str, object], text: str, reason: str) -> None:
    out, said, why = stream(**params), "", None
    for token in tokens:
        more, why = out.add(token, 101.0)
        said += more
    assert (said, why) == (text, reason)


def test_a_stop_string_completed_by_the_flushed_tail_counts() -> None:
    """The last token leaves half a character behind; its replacement may be what the stop waits for."""
    out = stream(stop=("\N{REPLACEMENT CHARACTER}",))
    said = "".join(out.add(token, 101.0)[0] for token in b"abcdefghi")
    text, reason = out.add(0xF0, 102.0)
    assert (said + text, reason) == ("abcdefghi", "stop")
