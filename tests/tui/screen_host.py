"""An app with nothing in it, to open a screen in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Static

import ferrum_tui
from ferrum_tui.theme import FERRUM

CSS = Path(ferrum_tui.__file__).parent / "css" / "screens.tcss"
NOTHING = object()

# Every size in our own colours, and every kind of colours in one size.
LOOKS = [((columns, rows), "ferrum") for columns, rows in ((120, 36), (80, 24), (40, 12))]
LOOKS += [((80, 24), theme) for theme in ("textual-light", "ansi-dark", "NO_COLOR")]


class Host(App[None]):
    """`result` is what the screen was dismissed with; the theme "NO_COLOR" is that variable's."""

    CSS_PATH = CSS

    def __init__(self, opened: Screen[Any], theme: str = FERRUM.name) -> None:
        if theme == "NO_COLOR":
            os.environ[theme], theme = "1", FERRUM.name  # the app takes it out again
        super().__init__()
        self._opened, self._wanted = opened, theme
        self.result: Any = NOTHING

    def on_mount(self) -> None:
        self.register_theme(FERRUM)
        self.theme = self._wanted
        self.push_screen(self._opened, self._take_result)

    def _take_result(self, result: Any) -> None:
        self.result = result


def note(pilot: Pilot[Any]) -> str:
    return str(pilot.app.screen.query_one(".note", Static).content)
