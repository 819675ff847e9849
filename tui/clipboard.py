"""Copying out of the chat, and saying honestly what came of it."""

from __future__ import annotations

from typing import Any

from textual.app import App


async def copy(app: App[Any], text: str) -> str:
    """Put text on the clipboard; returns what to tell the user."""
    app.copy_to_clipboard(text)
    return "Copied."
