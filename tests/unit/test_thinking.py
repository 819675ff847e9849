"""Thinking and answer come apart at the tags, however the text arrives; nothing leaks, nothing is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_mlx.thinking import Channels, Split, Splitter, Tags, Unsplit, find_format

from .test_detokenizer import cut_up

TAGS = Tags("<think>", "</think>", ("<think>", "</think>"))
PIECES = ["<think>", "</think>", "<", "</thi", "nk>", "think", " ", "\n", "a", "日", "\n\n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 60), max_size=12)


def split(splitter: Splitter, pieces: list[str]) -> Split:
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return Split("".join(part.answer for part in parts), "".join(part.thinking for part in parts))


def by_pattern(text: str, opened: bool) -> tuple[Split, str]:
    """The same of a whole text, by a regular expression; and what is of neither."""
    opening = r"(\s{0,64}<think>\n*)" + ("?" if opened else "")
    whole = re.fullmatch(rf"(?s){opening}(\n*)(.*?)(?:(</think>\n*)(.*))?", text)
    if whole is None:
        return Split(text), ""
    tag, breaks, thinking, closing, answer = whole.groups()
    return Split(answer or "", thinking), (tag or "") + breaks + (closing or "")


@settings(max_examples=1500, deadline=None)
@given(TEXTS, CUTS, st.booleans())
def test_any_text_cut_up_anyhow(text: str, cuts: list[int], opened: bool) -> None:
    prompt_end = "<|assistant|>\n<think>\n" if opened else "<|assistant|>\n"
    parts = split(TAGS.splitter(prompt_end), cut_up(text, cuts))
    expected, outside = by_pattern(text, opened)
    assert parts == expected
    assert len(parts.answer) + len(parts.thinking) + len(outside) == len(text)


@pytest.mark.parametrize(
    ("prompt_end", "text", "answer", "thinking"),
    [
        ("", "<think>\nhm\n</think>\n\nHi", "Hi", "hm\n"),
        ("", "  \n<think>hm</think>Hi\n", "Hi\n", "hm"),
        ("<think>\n", "hm</think>\n\nHi", "Hi", "hm"),
        ("<think>", "\nhm</think>Hi", "Hi", "hm"),
        ("<think>\n", "<think>\nhm</think>Hi", "Hi", "hm"),
        ("<think>\n\n</think>\n\n", "Hi", "Hi", ""),
        ("", "<think>\n\n</think>\n\nHi", "Hi", ""),
        ("", "<think>never closed </thin", "", "never closed </thin"),
        ("", "the tag <think> opens, </think> closes", "the tag <think> opens, </think> closes", ""),
        ("", "<think>a</think>b<think>c</think>", "b<think>c</think>", "a"),
        ("", "</think>Hi", "</think>Hi", ""),
        ("", "<thinking", "<thinking", ""),
        ("", " \n", " \n", ""),
        ("", " " * 80 + "<think>a</think>", " " * 80 + "<think>a</think>", ""),
    ],
)
def test_where_tags_count(prompt_end: str, text: str, answer: str, thinking: str) -> None:
    assert split(TAGS.splitter(prompt_end), [text]) == (answer, thinking)
    assert split(TAGS.splitter(prompt_end), list(text)) == (answer, thinking)


def test_only_what_may_become_a_tag_is_held_back() -> None:
    splitter = TAGS.splitter("")
    shown = [splitter.feed(piece) for piece in ("<th", "ink>", "a", "b</", "i", "</think>", "\n", "c")]
    assert shown == [
        *(Split(), Split(), Split(thinking="a"), Split(thinking="b"), Split(thinking="</i")),
        *(Split(), Split(), Split("c")),
    ]


@pytest.mark.parametrize("splitter", [TAGS.splitter(""), TAGS.splitter("<think>"), Channels().splitter("")])
@pytest.mark.parametrize("piece", [" ", "<", "</think", "<|start|>", "<|end|"])
def test_what_is_held_does_not_grow(splitter: Splitter, piece: str) -> None:
    for _ in range(200):
        splitter.feed(piece)
    held = splitter.finish()
    assert len(held.answer + held.thinking) <= 300


def test_without_thinking_all_is_answer() -> None:
    assert split(Unsplit(), ["<think>", "a"]) == ("<think>a", "")


HARMONY = Channels()
ANALYSIS = "<|channel|>analysis<|message|>hm"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hi"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("text", "answer", "thinking"),
    [
        (f"{ANALYSIS}<|end|>{FINAL}", "Hi", "hm"),
        (f"{ANALYSIS}<|end|><|start|>assistant{ANALYSIS}<|end|>{FINAL}", "Hi", "hmhm"),
        ("<|channel|>final<|message|>Hi", "Hi", ""),
        (f"{ANALYSIS}<|end|>{CALL}", CALL, "hm"),
        ("<|channel|>commentary<|message|>Let me see.<|end|>" + FINAL, "Let me see.Hi", ""),
        ("no header <|end|", "no header <|end|", ""),
        (ANALYSIS + "<|e", "", "hm<|e"),
        (ANALYSIS + "<|end|><|start|>assis", "", "hm"),
        ("<|channel|>" + "x" * 300, "<|channel|>" + "x" * 300, ""),
        ("", "", ""),
    ],
)
@settings(max_examples=30, deadline=None)
@given(cuts=CUTS)
def test_channels(text: str, answer: str, thinking: str, cuts: list[int]) -> None:
    assert split(HARMONY.splitter(""), cut_up(text, cuts)) == (answer, thinking)
    assert split(HARMONY.splitter(""), list(text)) == (answer, thinking)


@pytest.mark.parametrize(
    ("vocabulary", "template", "opening"),
    [
        ({"<think>", "</think>", "a"}, "", "<think>"),
        ({"[THINK]", "[/THINK]"}, "", "[THINK]"),
        ({"<|channel>", "<channel|>"}, "", "<|channel>thought"),
        ({"a"}, "{{ '<think>' }}{{ content.split('</think>') }}", "<think>"),
        ({"a"}, "{{ '<think>' }}", None),
        ({"<think>"}, "", None),
        (set(), "", None),
    ],
)
def test_which_tags_a_model_has(vocabulary: set[str], template: str, opening: str | None) -> None:
    found = find_format(vocabulary, template)
    assert (found.opening if isinstance(found, Tags) else found) == opening


def test_channels_are_told_by_their_tokens() -> None:
    assert isinstance(find_format(set(HARMONY.tokens), ""), Channels)
