"""The terminal decides two things alone: how large the screen is, and when all is over."""

from __future__ import annotations

import os
import threading
import time

_EVERY = 2.0  # seconds


def follow_terminal() -> None:
    """Take the size the terminal has now, and end this process when it has gone: a closed window, a
    dropped connection.

    A shell that exports COLUMNS and LINES would fix the size at what it was then: Python asks them first.
    The end comes whoever may have kept the SIGHUP away, and the screen cannot bring it itself: it waits for
    ever to write, and its reader spins at the end of the input. What is kept of the conversation is
    committed; the engine's process ends with its parent.
    """
    for stale in ("COLUMNS", "LINES"):
        os.environ.pop(stale, None)
    threading.Thread(target=_watch, name="terminal", daemon=True).start()


def _watch() -> None:
    while os.isatty(0):
        time.sleep(_EVERY)
    os._exit(1)
