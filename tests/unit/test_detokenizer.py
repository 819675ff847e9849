"""Incremental text equals the whole decode; stop strings neither leak nor swallow text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_mlx.detokenizer import ByteLevelDetokenizer, Detokenizer, StopStrings, WindowDetokenizer

TEXTS = ["", " ", "a", " the", "\n\n", "日", "🎉", "é", "�", "##", "<|x|>"]
BYTE_TOKENS = [bytes([value]) for value in range(256)]
TOKENS = BYTE_TOKENS + [text.encode() for text in TEXTS] + [b"\xe6\x97", b"\xf0\x9f\x8e", b"\xffa"]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, len(TOKENS) - 1)))
def test_bytes_of_any_kind(ids: list[int]) -> None:
    whole = b"".join(TOKENS[i] for i in ids).decode("utf-8", errors="replace")
    assert "".join(pieces(ByteLevelDetokenizer(TOKENS.__getitem__), ids)) == whole


@given(st.text())
def test_a_character_is_shown_with_its_last_byte(text: str) -> None:
    detokenizer = ByteLevelDetokenizer(BYTE_TOKENS.__getitem__)
    for char in text.encode("utf-8", "ignore").decode():
        *first, last = char.encode()
        assert [detokenizer.add(byte) for byte in first] == [""] * len(first)
        assert detokenizer.add(last) == char
    assert detokenizer.finish() == ""


class SentencePieceLike:
    """A decoder with byte tokens: their run is text only if all of it is; the first space is dropped."""

    SKIPPED = frozenset({300})
    BYTES = frozenset(range(256))
    WORDS = ("▁", "▁a", "b", "▁日", "<mark>", "��", "▁▁")

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        parts: list[str] = []
        run = b""
        for token_id in [i for i in ids if i not in self.SKIPPED] + [-1]:
            if 0 <= token_id < 256:
                run += bytes([token_id])
                continue
            try:
                parts.append(run.decode())
            except UnicodeDecodeError:
                parts.append("�" * len(run))
            run = b""
            parts.append("" if token_id < 0 else self.WORDS[token_id - 256].replace("▁", " "))
        return "".join(parts).removeprefix(" ")

    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self.decode, self.SKIPPED.__contains__, self.BYTES)


IDS = st.one_of(
    st.integers(256, 262), st.just(300), st.sampled_from(list("日🎉é".encode())), st.integers(0, 255)
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(IDS))
def test_windows_over_a_decoder_that_looks_around(ids: list[int]) -> None:
    model = SentencePieceLike()
    assert "".join(pieces(model.detokenizer(), ids)) == model.decode(ids)


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(list("日🎉é".encode())), st.integers(0, 255))))
def test_windows_over_a_decoder_of_bytes_not_known_as_such(ids: list[int]) -> None:
    assert "".join(pieces(WindowDetokenizer(of_bytes, lambda _: False, frozenset()), ids)) == of_bytes(ids)


def test_half_a_character_is_held_back_whatever_its_ids() -> None:
    detokenizer = WindowDetokenizer(of_bytes, lambda _: False, frozenset())
    assert pieces(detokenizer, list("a🎉".encode())) == ["a", "", "", "", "🎉", ""]


def test_replacement_characters_that_stay_are_shown() -> None:
    model = SentencePieceLike()
    shown = pieces(model.detokenizer(), [261] * 2000)
    assert shown == [*[""] * 3, *["��"] * 1997, "��" * 3]
    assert model.decoded <= 16 * 2000


def test_whitespace_is_shown_at_once() -> None:
    model = SentencePieceLike()
    assert pieces(model.detokenizer(), [257, 256, 256, 262, 258]) == ["a", " ", " ", "  ", "b", ""]


def test_half_a_character_at_the_end_is_not_lost() -> None:
    assert pieces(ByteLevelDetokenizer(BYTE_TOKENS.__getitem__), [0xF0, 0x9F]) == ["", "", "�"]
    assert pieces(SentencePieceLike().detokenizer(), [0xF0, 0x9F]) == ["", "", "��"]


@pytest.mark.parametrize("ids", [[257] * 2000, [257, *"日本".encode()] * 300])
def test_work_a_token_does_not_grow(ids: list[int]) -> None:
    model = SentencePieceLike()
    pieces(model.detokenizer(), ids)
    assert model.decoded <= 8 * len(ids)


def cut_up(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def first_complete(text: str, stops: list[str]) -> int | None:
    """Where to cut, by reading one character after the other."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


STOPS = st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3)


@settings(max_examples=1000, deadline=None)
@given(st.text("ab#c", max_size=20), STOPS, st.lists(st.integers(0, 20), max_size=6))
def test_stop_strings_however_the_text_is_cut_up(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = StopStrings(stops)
    shown, stopped = "", False
    for piece in cut_up(text, cuts):
        emitted, stopped = stream.feed(piece)
        shown += emitted
        if stopped:
            break
    cut = first_complete(text, stops)
    assert stopped is (cut is not None)
    assert shown + stream.finish() == (text if cut is None else text[:cut])


@given(st.text("ab#c", max_size=20), STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown, stopped = stream.feed(text)
    held = "" if stopped else text[len(shown) :]
    assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_in_other_tokens_than_its_own() -> None:
    stream = StopStrings(["##"])
    assert [stream.feed(piece) for piece in ("x", "#", "#", "y")] == [
        ("x", False),
        ("", False),
        ("", True),
        ("", True),
    ]
    assert stream.finish() == ""


def test_a_false_start_is_shown_when_it_fails() -> None:
    stream = StopStrings(["END", "NDX"])
    assert [stream.feed(piece) for piece in ("aE", "N", "x")] == [("a", False), ("", False), ("ENx", False)]


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).feed("anything") == ("anything", False)


@settings(max_examples=1000, deadline=None)
@given(st.text("ab#c", max_size=20), STOPS, st.lists(st.integers(0, 20), max_size=6), st.integers(0, 6))
def test_stop_strings_complete_before_they_count_are_passed_over(
    text: str, stops: list[str], cuts: list[int], unarmed: int
) -> None:
    stream = StopStrings(stops)
    pieces = cut_up(text, cuts)
    shown, stopped = "", False
    for i, piece in enumerate(pieces):
        emitted, stopped = stream.feed(piece, armed=i >= unarmed)
        shown += emitted
        if stopped:
            break
    early = len("".join(pieces[:unarmed]))
    ends = (end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops)))
    end = next(ends, None) if stops else None
    assert stopped is (end is not None)
    if end is not None:
        text = text[: min(end - len(stop) for stop in stops if text[:end].endswith(stop))]
    assert shown + stream.finish() == text
