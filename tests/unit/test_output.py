"""Text and reasons on a request's way out."""

from __future__ import annotations

import pytest

from ferrum_mlx.backends.fake import EOS, FakeCodec
from ferrum_mlx.output import NewText, OutputStream, end_ids
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams


def stream(**params: object) -> OutputStream:
    request = Request("r", [1] * 30, SamplingParams(**params), seed=0, max_tokens=10)
    return OutputStream(request, FakeCodec(), arrived=100.0)


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
        new = out.add(token, 101.0)
        said, why = said + new.text, new.finish_reason
    assert (said, why) == (text, reason)


def test_a_stop_string_completed_by_the_flushed_tail_counts() -> None:
    """The last token leaves half a character behind; its replacement may be what the stop waits for."""
    out = stream(stop=("\N{REPLACEMENT CHARACTER}",))
    said = "".join(out.add(token, 101.0).text for token in b"abcdefghi")
    last = out.add(0xF0, 102.0)
    assert (said + last.text, last.finish_reason) == ("abcdefghi", "stop")


def said(out: OutputStream, tokens: bytes | list[int]) -> tuple[str, str, str | None]:
    """(text, thinking, reason) of tokens up to the end, or of all and the flush."""
    new = [NewText()]
    for token in tokens:
        new.append(out.add(token, 101.0))
        if new[-1].finish_reason:
            break
    else:
        new.append(out.flush())
    text, thinking = ("".join(getattr(part, name) for part in new) for name in ("text", "thinking"))
    return text, thinking, new[-1].finish_reason


def chat(**params: object) -> OutputStream:
    request = Request("r", [1] * 3, SamplingParams(**params), seed=0, max_tokens=100)
    return OutputStream(request, FakeCodec(), arrived=100.0, is_chat=True)


THOUGHT = b"<think>\na END b\n</think>\n\nc END d"


def test_a_conversation_s_thinking_is_apart_and_a_bare_prompt_s_is_not() -> None:
    assert said(chat(), THOUGHT) == ("c END d", "a END b\n", None)
    bare = OutputStream(chat().request, FakeCodec(), arrived=100.0)
    assert said(bare, THOUGHT) == (THOUGHT.decode(), "", None)


def test_a_prompt_that_opens_the_tag() -> None:
    request = Request("r", [*b"<think>\n"], SamplingParams(), seed=0, max_tokens=100)
    out = OutputStream(request, FakeCodec(), arrived=100.0, is_chat=True)
    assert said(out, b"a</think>b") == ("b", "a", None)


def test_stop_strings_count_in_the_answer_alone() -> None:
    assert said(chat(stop=("END",)), THOUGHT) == ("c ", "a END b\n", "stop")


@pytest.mark.parametrize("tokens", [[*b"<think>ab"], [*b"<think>ab", EOS]])
def test_a_tag_that_never_closes_leaves_no_answer(tokens: list[int]) -> None:
    reason = "stop" if EOS in tokens else None
    assert said(chat(), tokens) == ("", "ab", reason)


def test_the_end_by_length_loses_nothing_that_is_held() -> None:
    out = chat(stop=("bcx",))
    out.request.max_tokens = 12
    assert said(out, b"<think>a</thi") == ("", "a</th", "length")
    out = chat(stop=("bcx",))
    out.request.max_tokens = 3
    assert said(out, b"abc") == ("abc", "", "length")


@pytest.mark.parametrize(
    ("tokens", "params", "text", "reason"),
    [
        (b"abcd", {"stop_token_ids": (ord("c"),)}, "ab", "stop"),
        ([*b"ab", EOS, *b"c"], {"ignore_eos": True}, "abc", None),
        ([*b"ab", EOS, *b"c"], {"ignore_eos": True, "stop_token_ids": (EOS,)}, "ab", "stop"),
        ([*b"ab", EOS, *b"cd", EOS], {"min_tokens": 4}, "abcd", "stop"),
        ([*b"ab", EOS, *b"c"], {"min_tokens": 3}, "ab", "stop"),
        (b"abcabc", {"min_tokens": 3, "stop_token_ids": (ord("b"),)}, "abca", "stop"),
        (b"ab#ab#", {"min_tokens": 2, "stop": ("b#",)}, "a", "stop"),
        (b"ab#ab#", {"min_tokens": 3, "stop": ("b#",)}, "ab#a", "stop"),
        (b"ab#ab#", {"min_tokens": 6, "stop": ("b#",)}, "ab#ab#", None),
    ],
)
def test_ends_that_count(tokens: bytes, params: dict[str, object], text: str, reason: str | None) -> None:
    out = OutputStream(chat(**params).request, FakeCodec(), arrived=100.0)
    assert said(out, tokens) == (text, "", reason)


def test_an_id_that_ends_the_output_is_counted() -> None:
    out = chat(stop_token_ids=(ord("c"),))
    said(out, b"abcd")
    assert out.request.output == [*b"abc"]


def test_end_ids() -> None:
    codec = FakeCodec()
    assert end_ids(SamplingParams(stop_token_ids=(7,)), codec) == {7, EOS}
    assert end_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), codec) == {7}
