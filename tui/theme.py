"""Our colours: iron and rust, and the same on paper."""

from __future__ import annotations

from typing import Any

from textual.app import App
from textual.theme import Theme

from ferrum_mlx.errors import shown

FERRUM = Theme(
    name="ferrum",
    primary="#d9783f",
    secondary="#7fa6ad",
    accent="#e8935a",
    foreground="#e6e1da",
    background="#141416",
    surface="#1b1b1f",
    panel="#26262b",
    success="#9dbb7d",
    warning="#dcae62",
    error="#dd6b60",
    dark=True,
    variables={"text-accent": "#e8935a", "text-secondary": "#7fa6ad"},
)

FERRUM_LIGHT = Theme(
    name="ferrum-light",
    primary="#b3541e",
    secondary="#2f6570",
    accent="#b3541e",
    foreground="#1d1a17",
    background="#faf8f5",
    surface="#f1ede7",
    panel="#e6e0d8",
    success="#4d7a2b",
    warning="#96610a",
    error="#b3362c",
    dark=False,
)


def choose_theme(app: App[Any], wanted: str) -> tuple[str, ...]:
    """The theme of that name, ours if there is none, or "" is wanted; what the user must know of it."""
    for theme in (FERRUM, FERRUM_LIGHT):
        app.register_theme(theme)
    known = not wanted or wanted in app.available_themes
    app.theme = wanted if wanted and known else FERRUM.name
    if known:
        return ()
    names = ", ".join(sorted(app.available_themes))
    return (f"the settings name {shown(wanted)}, which is no theme; allowed: {names}",)
