"""What a command with a screen needs before it opens: a terminal, and the model on this machine."""

from __future__ import annotations

import os
from typing import TextIO

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import DownloadError, ModelFileError, ModelNotFoundError


def has_screen(*streams: TextIO) -> bool:
    """Whether all of them are a terminal that can show one; it is drawn on stderr."""
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def pull_if_missing(config: EngineConfig) -> None:
    """Download here, where progress can be shown: a child process has no terminal."""
    if config.backend == "fake":
        return
    from ferrum_mlx import hub
    from ferrum_mlx.fit import backend_here

    backend = backend_here(config.backend)
    hub.resolve(config.model, offline=config.offline, progress=True, backend=backend)
    if config.draft_model:
        hub.resolve(config.draft_model, offline=config.offline, progress=True, backend=backend)


def prepare_chat(config: EngineConfig, *, named: bool) -> list[str]:
    """As pull_if_missing, but a chat on the screen opens without the model, too, and says what is missing.

    Fetched are the default model and one that the command line names. One that the settings file names is
    the chat's to offer.

    Args:
        named: the model stands on the command line, where a name that stands for none is an error.

    Returns:
        What the user must know of a download that failed.
    """
    if config.backend == "fake" or (config.model and not named):
        return []
    from ferrum_mlx import hub, hub_repo
    from ferrum_mlx.fit import backend_here

    if named:
        hub.info(config.model, backend_here(config.backend))
    if config.offline or hub_repo.is_offline():
        return []
    try:
        pull_if_missing(config)
    except (DownloadError, ModelFileError) as error:
        return [str(error)]
    except ModelNotFoundError:  # a repository that the hub does not have
        if named:
            raise
    return []
