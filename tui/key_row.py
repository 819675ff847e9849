"""The row of keys at the bottom of a screen: whole ones only, those that answer a screen first."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_FIRST = ("enter", "escape")
_BLANKS = 3  # cells around a key, and behind what it does
_WITH_PALETTE = 60  # cells of a row that has room for it
_EDGE = 2  # more of the palette's, which stands at the right


class KeyRow(Footer):
    """What does not fit is hidden; what is behind it and shorter takes its place."""

    def compose(self) -> ComposeResult:
        keys = sorted(self._keys(super().compose()), key=lambda key: key.key not in _FIRST)
        self._fit(keys)
        yield from keys

    def on_resize(self) -> None:
        self._fit(self._keys(self.children))

    def _keys(self, found: Iterable[object]) -> list[FooterKey]:
        return [key for key in found if isinstance(key, FooterKey)]

    def _fit(self, keys: list[FooterKey]) -> None:
        """Show what there is room for, in the order of the keys; on a wide row the palette's before all."""
        room = self.size.width
        palette = [key for key in keys if key.has_class("-command-palette")]
        for key in palette:
            key.display = room >= _WITH_PALETTE
            room -= (_width(key) + _EDGE) * key.display
        for key in keys:
            if key not in palette:
                key.display = _width(key) - 1 <= room  # the last blank may be missing
                room -= _width(key) * key.display


def _width(key: FooterKey) -> int:
    return Content(key.key_display + key.description).cell_length + _BLANKS
