"""Our colours: iron and rust."""

from __future__ import annotations

from textual.theme import Theme

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
)
