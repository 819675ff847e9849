"""One layout where Textual does two: a growing answer is laid out, and drawn, some ten times a second."""

from __future__ import annotations

from textual.geometry import Size
from textual.reactive import Reactive


class LaidOutOnce:
    """Mixed into a widget whose size follows from what is in it, and which nothing within measures itself by.

    Textual lays all out again where a layout has changed any `Widget.virtual_size`. A scrollbar that comes
    or goes asks for that by itself.
    """

    virtual_size = Reactive(Size(0, 0), repaint=False)
