"""Copying out of the chat, and saying honestly what came of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from typing import Any

from textual.app import App

from ferrum_mlx.sanitize import sanitize

_PATIENCE = 2.0  # seconds for a tool
_TOLD = 200  # characters of a tool's own words
# Programs that put what they read on the clipboard, the variable they need, and the encoding they read.
_TOOLS = (
    (("pbcopy",), "", "utf-8"),
    (("wl-copy",), "WAYLAND_DISPLAY", "utf-8"),
    (("xclip", "-selection", "clipboard", "-in"), "DISPLAY", "utf-8"),
    (("xsel", "--clipboard", "--input"), "DISPLAY", "utf-8"),
    (("clip.exe",), "", "utf-16-le"),
)


async def copy(app: App[Any], text: str) -> str:
    """Put text on the clipboard; returns what to tell the user.

    On this machine by a tool of its own; over SSH, or without one, the terminal is asked to (OSC 52), and
    never says whether it did.
    """
    text = sanitize(text)  # a control code that is pasted into a shell does harm
    count = f"{len(text):,} character{'s' * (len(text) != 1)}"
    failed = ""
    if not (os.environ.get("SSH_TTY") or os.environ.get("SSH_CONNECTION")):
        for command, needs, encoding in _TOOLS:
            if shutil.which(command[0]) and (not needs or os.environ.get(needs)):
                failed = await _hand_to(command, text.encode(encoding, errors="replace"))
                if not failed:
                    app._clipboard = text  # what Ctrl+V inserts here; the public way asks the terminal, too
                    return f"Copied {count}."
    app.copy_to_clipboard(text)
    reason = f"{failed}; " if failed else ""
    return f"{reason}{count} sent to the terminal; whether it took them cannot be known."


async def _hand_to(command: tuple[str, ...], data: bytes) -> str:
    """Returns what went wrong, "" if nothing did.

    Some tools leave a process behind that holds what they write to, so that is a file and not a pipe.
    """
    with tempfile.TemporaryFile() as words:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=words
            )
        except OSError as error:
            return f"{command[0]} failed: {error.strerror}"
        try:
            async with asyncio.timeout(_PATIENCE):
                await process.communicate(data)
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"{command[0]} did not answer within {_PATIENCE:.0f} s"
        if not process.returncode:
            return ""
        words.seek(0)
        said = " ".join(sanitize(words.read(_TOLD).decode(errors="replace")).split())
        return f"{command[0]} failed: {said or f'exit code {process.returncode}'}"
