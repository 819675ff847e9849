"""The screen as an SVG that a person can read and compare, and the ones that are kept of it.

A line of the file is a run of cells in one style, so that two pictures differ where the screens do.
FERRUM_SNAPSHOTS=write draws those that are kept anew.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from difflib import unified_diff
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.color import blend_rgb
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME as TERMINAL
from textual.pilot import Pilot

from .driver import WAIT, screen

KEPT = Path(__file__).parent / "snapshots"
WRITE = os.environ.get("FERRUM_SNAPSHOTS") == "write"
WIDE, HIGH, BASE = 10, 20, 15  # user units of a cell, and down to the line its letters stand on
_CALM = 5  # looks at a screen, 0.1 s apart, that are all the same
_SHOWN = 30  # lines of a difference
_EVEN = re.compile(r"[\0-⹿]+|[^\0-⹿]+")  # letters of one width, so that a font may have others


def picture(app: Any) -> str:
    columns, rows = app.size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDE} {rows * HIGH}" '
        'font-family="monospace" font-size="16" xml:space="preserve">'
    ]
    for row, strip in enumerate(app.screen._compositor.render_strips()):
        lines += [f"<!-- {row} -->", *_row(strip, row * HIGH)]
    return "\n".join([*lines, "</svg>", ""])


def _row(strip: Any, top: int) -> Iterator[str]:
    at = 0
    for attributes, segments in groupby(strip, key=lambda segment: _attributes(segment.style or Style())):
        text = "".join(segment.text for segment in segments)
        ground, letters = attributes
        width = cell_len(text) * WIDE
        yield f'<rect x="{at * WIDE}" y="{top}" width="{width}" height="{HIGH}" fill="{ground}"/>'
        for piece in _EVEN.findall(text):
            x, wide = at * WIDE, cell_len(piece) * WIDE
            at += cell_len(piece)
            if piece.strip():
                yield f'<text x="{x}" y="{top + BASE}" textLength="{wide}" {letters}>{escape(piece)}</text>'


def _attributes(style: Style) -> tuple[str, str]:
    """Of the ground and of the letters."""
    front = (style.color or _DEFAULT).get_truecolor(TERMINAL)
    back = (style.bgcolor or _DEFAULT).get_truecolor(TERMINAL, foreground=False)
    if style.reverse:
        front, back = back, front
    if style.dim:
        front = blend_rgb(front, back, 0.4)
    marks = [
        ("font-weight", "bold", style.bold),
        ("font-style", "italic", style.italic),
        ("text-decoration", "underline", style.underline),
        ("text-decoration", "line-through", style.strike),
    ]
    given = "".join(f' {name}="{value}"' for name, value, there in marks if there)
    return back.hex, f'fill="{front.hex}"{given}'


_DEFAULT = Style.parse("default").color
assert _DEFAULT is not None


def difference(kept: str, now: str) -> str:
    """The first lines in which two pictures differ; "" where they are the same."""
    found = unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", lineterm="", n=1)
    return "\n".join(list(found)[:_SHOWN])


async def check(pilot: Pilot[Any], name: str) -> None:
    """The screen is, or soon becomes, the picture that is kept under that name."""
    file, other = KEPT / f"{name}.svg", KEPT / f"{name}.actual.svg"
    if WRITE:
        file.write_text(await calm(pilot))
        return
    kept = file.read_text()
    deadline = time.monotonic() + WAIT / 3
    while (now := picture(pilot.app)) != kept:
        if time.monotonic() > deadline:
            other.write_text(now)
            told = f"{name} looks different; it is kept as it is now in {other}"
            raise AssertionError(f"{told}\n{difference(kept, now)}\n{screen(pilot.app)}")
        await _drawn(pilot, 0.05)


async def calm(pilot: Pilot[Any]) -> str:
    """The picture of a screen that does not change any more."""
    looks: list[str] = []
    while len(looks) < _CALM or len(set(looks[-_CALM:])) > 1:
        await _drawn(pilot, 0.1)
        looks.append(picture(pilot.app))
    return looks[-1]


async def _drawn(pilot: Pilot[Any], seconds: float) -> None:
    """A screen that another covers is not drawn anew as a part of it changes."""
    for each in pilot.app.screen_stack:
        each.refresh()
    await pilot.pause(seconds)
