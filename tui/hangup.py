"""The end of a chat whose terminal is gone: a closed window, a dropped connection."""

from __future__ import annotations

import os
import threading
import time

_EVERY = 2.0  # seconds


def end_with_terminal() -> None:
    """End this process when its terminal has gone, whoever may have kept its SIGHUP away.

    The screen cannot do it itself: it waits for ever to write, and its reader spins at the end of the
    input. What is kept of the conversation is committed; the engine's process ends with its parent.
    """
    threading.Thread(target=_watch, name="terminal", daemon=True).start()


def _watch() -> None:
    while os.isatty(0):
        time.sleep(_EVERY)
    os._exit(1)
