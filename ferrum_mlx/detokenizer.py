"""Token ids to text as they arrive, and stop strings in that text. Plain Python, flat cost a token.

The pieces of a detokenizer's output joined equal the decode of all ids at once, byte for byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_UNFINISHED = 3  # ids: a character has at most four bytes, and its last one completes it


class Detokenizer(Protocol):
    """The text of one generation, piece by piece."""

    def add(self, token_id: int) -> str:
        """The text that is certain now that `token_id` follows; may be empty."""

    def finish(self) -> str:
        """The text still held back; call once, after the last id."""


class ByteLevelDetokenizer:
    """For vocabularies in which a token is a run of bytes, whatever its neighbours.

    Args:
        token_bytes: the bytes of an id, empty for one that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes only the ids since the last text shown and those just before.

    Args:
        decode: ids -> text.
        skipped: whether an id is not shown.
        byte_ids: ids that stand for one byte each; how a run of them decodes is known only at its end.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: Callable[[int], bool], byte_ids: frozenset[int]
    ) -> None:
        self._decode, self._skipped, self._byte_ids = decode, skipped, byte_ids
        self._shown: list[int] = []  # context: decoders treat the first token of a text differently
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        if self._skipped(token_id):
            return ""
        self._pending.append(token_id)
        return "" if token_id in self._byte_ids else self._advance(final=False)

    def finish(self) -> str:
        return self._advance(final=True) if self._pending else ""

    def _advance(self, *, final: bool) -> str:
        text = self._decode(self._shown + self._pending)
        cut = len(self._pending)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:  # perhaps half a character
            if (cut := self._certain()) == 0:
                return ""
            text = self._decode(self._shown + self._pending[:cut])
        before = len(self._decode(self._shown)) if self._shown else 0
        if len(text) > before or self._shown:
            shown, self._pending = self._pending[:cut], self._pending[cut:]
            # a character cut in two needs its first byte as context
            self._shown = (self._shown + shown)[-_UNFINISHED:] if self._pending else shown
        return text[before:]

    def _certain(self) -> int:
        """How many pending ids no later id can change: all but what three bytes of a character may take."""
        cut = max(0, len(self._pending) - _UNFINISHED)
        while cut and {self._pending[cut - 1], self._pending[cut]} <= self._byte_ids:
            cut += 1  # a run of byte ids is decoded as one
        return cut


class StopStrings:
    """Cuts a stream of text at the first stop string that is complete, however the text is cut up.

    Of two that become complete with the same character, the longer one counts.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text to show, whether a stop string was met); holds back what may become a stop string.

        One that becomes complete while not `armed` is passed over, and shown.
        """
        if self._stopped:
            return "", True
        known = len(self._held)
        text = self._held + text
        if armed:
            starts = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops)
            found = [(at + len(stop), at) for at, stop in starts if at >= 0]
            if found:
                self._stopped, self._held = True, ""
                return text[: min(found)[1]], True
        cut = len(text) - overhang(text, self._stops)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held


def overhang(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that is less than a whole mark, but begins one."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and len(text) - at > longest:
            if mark.startswith(text[at:]):
                longest = len(text) - at
            at = text.find(mark[0], at + 1)
    return longest
