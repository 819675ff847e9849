"""What a command with a screen needs before it opens: a terminal, and the model on this machine."""

from __future__ import annotations

import os
from typing import TextIO

from ferrum_mlx.config import EngineConfig


def has_screen(*streams: TextIO) -> bool:
    """Whether all of them are a terminal that can show one; it is drawn on stderr."""
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def pull_if_missing(config: EngineConfig) -> None:
    """Download here, where progress can be shown: a child process has no terminal."""
    if config.backend != "fake":
        from ferrum_mlx import hub

        hub.resolve(config.model, offline=config.offline, progress=True, backend=config.backend)
