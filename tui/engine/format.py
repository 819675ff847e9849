"""Numbers as people read them, and lines out of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

Part = tuple[str, str]  # text, style
LABEL = 8  # cells of a section's name


def milliseconds(seconds: float) -> str:
    """Without the unit: 20.3 below a hundred, 1,204 above."""
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def short(count: float) -> str:
    """A count in at most five cells."""
    for unit in ("", "k", "M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if count >= 100 or not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}G"


def section(name: str, *parts: Part | Content | str) -> Content:
    """A line that begins with the name of what it is about."""
    return Content.assemble((f"{name:<{LABEL}}", "bold"), *parts)


def fit(groups: Iterable[Sequence[Part]], width: int) -> Content:
    """As many of the groups, from the first, as the width holds."""
    line = Content("")
    for group in groups:
        longer = Content.assemble(line, "  " if line else "", *group)
        if longer.cell_length > width:
            break
        line = longer
    return line


def bar(share: float, width: int) -> Content:
    """A gauge of `width` cells."""
    full = max(0, min(width, round(share * width)))
    return Content.assemble(("━" * full, "$accent"), ("─" * (width - full), "dim"))
