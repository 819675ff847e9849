"""What a reasoning model says to itself, told from its answer as the text arrives.

Tags are no part of either text, nor are the line breaks after them. An opening tag counts only where
the output begins: an answer may speak of it. One that never closes leaves all the rest as thinking.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ferrum_mlx.detokenizer import overhang

_BLANKS_BEFORE = 64  # characters of white space before the opening tag
_LONGEST_HEADER = 256  # characters


class Split(NamedTuple):
    answer: str = ""
    thinking: str = ""


class Splitter(Protocol):
    """Flat cost a piece; what may be the beginning of a tag is held back."""

    def feed(self, text: str) -> Split: ...

    def finish(self) -> Split:
        """The text still held back; call once."""
        ...


class ThinkingFormat(Protocol):
    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens that tags are made of, where the vocabulary has them; a detokenizer must show these."""
        ...

    def splitter(self, prompt_end: str) -> Splitter:
        """One for an answer behind a prompt that ends so: its template may have opened the tag."""
        ...


class Unsplit:
    """For models without thinking: all is answer."""

    def feed(self, text: str) -> Split:
        return Split(text)

    def finish(self) -> Split:
        return Split()


@dataclass(frozen=True, slots=True)
class Tags:
    """Thinking stands between two texts."""

    opening: str
    closing: str
    tokens: tuple[str, ...]

    def splitter(self, prompt_end: str) -> Splitter:
        return _TagSplitter(self.opening, self.closing, prompt_end.rstrip().endswith(self.opening))


@dataclass(frozen=True, slots=True)
class Channels:
    """The harmony format: messages of a header each, which names a channel; `analysis` is thinking.

    A message to a function is kept in the answer with its header, so that it can be told from text.
    """

    tokens: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")

    def splitter(self, prompt_end: str) -> Splitter:
        return _ChannelSplitter()


def _pair(opening: str, closing: str) -> Tags:
    return Tags(opening, closing, (opening, closing))


_FORMATS: Sequence[Tags | Channels] = (
    _pair("<think>", "</think>"),
    _pair("[THINK]", "[/THINK]"),
    _pair("<thought>", "</thought>"),
    _pair("<seed:think>", "</seed:think>"),
    _pair("<longcat_think>", "</longcat_think>"),
    _pair("<|think:start|>", "<|think:end|>"),
    Tags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    Channels(),
)


def find_format(vocabulary: Collection[str], template: str) -> ThinkingFormat | None:
    """How a model marks its thinking: by tokens of its vocabulary, else by texts in its chat template."""
    for known in _FORMATS:
        if all(token in vocabulary for token in known.tokens):
            return known
    tags = (known for known in _FORMATS if isinstance(known, Tags))
    return next((known for known in tags if known.opening in template and known.closing in template), None)


class _TagSplitter:
    def __init__(self, opening: str, closing: str, opened: bool) -> None:
        self._opening, self._closing = opening, closing
        self._begun = False  # whether it is known how the output begins
        self._thinks = opened
        self._after_tag = opened  # nothing but line breaks since a tag
        self._held = ""

    def feed(self, text: str) -> Split:
        text, self._held = self._held + text, ""
        if not self._begun:
            bare = text.lstrip()
            near = len(text) - len(bare) <= _BLANKS_BEFORE
            if near and self._opening.startswith(bare) and bare != self._opening:
                self._held = text
                return Split()
            self._begun = True
            if near and bare.startswith(self._opening):  # a model may repeat what its template has opened
                self._thinks = self._after_tag = True
                text = bare[len(self._opening) :]
        if not self._thinks:
            return Split(self._without_breaks(text))
        thinking, tag, text = text.partition(self._closing)
        if not tag:
            cut = len(thinking) - overhang(thinking, (self._closing,))
            thinking, self._held = thinking[:cut], thinking[cut:]
            return Split(thinking=self._without_breaks(thinking))
        thinking = self._without_breaks(thinking)
        self._thinks, self._after_tag = False, True
        return Split(self._without_breaks(text), thinking)

    def finish(self) -> Split:
        held, self._held = self._without_breaks(self._held), ""
        return Split(thinking=held) if self._thinks else Split(held)

    def _without_breaks(self, text: str) -> str:
        if self._after_tag:
            text = text.lstrip("\n")
            self._after_tag = not text
        return text


class _ChannelSplitter:
    _HEADS = ("<|channel|>", "<|start|>", "<|message|>")  # what a header may begin with

    def __init__(self) -> None:
        self._in_header = True
        self._thinks = False
        self._held = ""

    def feed(self, text: str) -> Split:
        text, self._held = self._held + text, ""
        answer, thinking = "", ""
        while text:
            if self._in_header:
                shown, text, waits = self._header(text)
            else:
                shown, text, waits = self._body(text)
            if self._thinks:
                thinking += shown
            else:
                answer += shown
            if waits:
                self._held = text
                break
        return Split(answer, thinking)

    def finish(self) -> Split:
        held, self._held = self._held, ""
        if self._in_header and held.startswith(self._HEADS):
            return Split()  # a message that never began
        return Split(thinking=held) if self._thinks else Split(held)

    def _header(self, text: str) -> tuple[str, str, bool]:
        """(text to show, the rest, whether the rest waits for more)"""
        header, end, body = text.partition("<|message|>")
        if not any(text.startswith(head) or head.startswith(text) for head in self._HEADS) or (
            not end and len(text) > _LONGEST_HEADER
        ):
            self._in_header, self._thinks = False, False  # no header at all
            return "", text, False
        if not end:
            return "", text, True
        self._in_header = False
        channel = header.partition("<|channel|>")[2]
        self._thinks = channel.split(" ")[0] == "analysis"
        return (header + end if " to=" in header and not self._thinks else ""), body, False

    def _body(self, text: str) -> tuple[str, str, bool]:
        body, end, rest = text.partition("<|end|>")
        if end:
            self._in_header = True
            return body, rest, False
        cut = len(body) - overhang(body, ("<|end|>",))
        return body[:cut], body[cut:], True
