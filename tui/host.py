"""An engine as the screen has it: started after the first paint, told of, replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from textual.app import App
from textual.message import Message

from ferrum_mlx import hub
from ferrum_mlx.catalog import default_card
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, ModelNotFoundError
from ferrum_mlx.fit import backend_here
from ferrum_mlx.messages import Ready

MakeClient = Callable[[EngineConfig, Callable[[str], None], Callable[[FerrumError], None]], EngineClient]
State = Literal["loading", "ready", "failed"]


class HostMessage(Message):
    def __init__(self, host: EngineHost) -> None:
        super().__init__()
        self.host = host


class EngineLoading(HostMessage):
    def __init__(self, host: EngineHost, stage: str) -> None:
        super().__init__(host)
        self.stage = stage


class EngineReady(HostMessage):
    def __init__(self, host: EngineHost, ready: Ready) -> None:
        super().__init__(host)
        self.ready = ready


class EngineNote(HostMessage):
    def __init__(self, host: EngineHost, what: str) -> None:
        super().__init__(host)
        self.what = what


class EngineGone(HostMessage):
    """The engine died, or could not be started (`started` is False)."""

    def __init__(self, host: EngineHost, error: FerrumError, started: bool) -> None:
        super().__init__(host)
        self.error, self.started = error, started


class EngineHost:
    """Its messages go to the app, from whatever thread.

    Attributes:
        state: as the screen has been told; "failed" waits for the user.
        detail: what it is doing while it loads, in words.
        model: its name for people.
        before: of the engine that this one is in place of, with another model; None once this one has run.
    """

    def __init__(
        self,
        app: App[Any],
        config: EngineConfig,
        make_client: MakeClient,
        before: EngineConfig | None = None,
    ) -> None:
        self._app = app
        self.config = config
        self.before = before
        self.state: State = "loading"
        self.detail = ""
        self.model = Path(name_of(config)).name
        self.client = make_client(config, self._loading, self._died)
        self.client.on_note = self._noted

    @property
    def way_back(self) -> str:
        """What in the chat leads from a model that does not load to the one before; "" where none was."""
        return f"/model {name_of(self.before)} goes back" if self.before is not None else ""

    def start(self, after: EngineHost | None = None) -> None:
        """`after` loads first: each engine counts the memory that is free when it loads."""
        self._work(self.client.start if after is None else partial(self._start_after, after))

    def restart(self) -> None:
        """Bring up a new engine in place of one that died or did not start."""
        self.state, self.detail = "loading", "starting a new engine"
        self._work(self.client.restart)

    async def close(self) -> None:
        """End the engine, and the start that a worker may wait for, too."""
        await asyncio.to_thread(self.client.close)

    def came(self, ready: Ready) -> None:
        """Take the news that the engine accepts requests."""
        self.state, self.detail, self.before = "ready", "", None
        self.model = Path(ready.info.model_id).name  # of a file or a repository, what tells it apart

    def _work(self, start: Callable[[], Ready]) -> None:
        self._app.run_worker(
            partial(self._start, start), thread=True, exclusive=True, group=f"engine {id(self)}"
        )

    def _start(self, start: Callable[[], Ready]) -> None:
        try:
            _check_is_here(self.config)
            ready = start()
        except FerrumError as error:
            self._app.post_message(EngineGone(self, error, started=False))
        else:
            self._app.post_message(EngineReady(self, ready))

    def _start_after(self, other: EngineHost) -> Ready:
        self._loading(f"waiting for {other.model}")
        with contextlib.suppress(FerrumError):  # it is told where the other one is
            other.client.start()
        return self.client.start()

    def _loading(self, stage: str) -> None:
        self._app.post_message(EngineLoading(self, stage))

    def _noted(self, what: str) -> None:
        self._app.post_message(EngineNote(self, what))

    def _died(self, error: FerrumError) -> None:
        self._app.post_message(EngineGone(self, error, started=True))


def name_of(config: EngineConfig) -> str:
    """What a command calls the model by."""
    return config.model or default_card().alias


def _check_is_here(config: EngineConfig) -> None:
    """An engine fetches what it lacks, where nobody would see it: on a screen it is not asked to.

    Raises:
        ModelNotFoundError: the model is not on this machine; says what in the chat fetches it.
        FerrumError: a name that stands for none, or files that cannot be.
    """
    if config.backend == "fake":
        return
    backend = backend_here(config.backend)
    try:
        hub.resolve(config.model, offline=True, backend=backend)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.what, error.allowed, _next_step(config, backend)) from error
    if config.draft_model:
        hub.resolve(config.draft_model, offline=True, backend=backend)


def _next_step(config: EngineConfig, backend: str) -> str:
    try:
        name = hub.info(config.model, backend).name
    except ModelNotFoundError:  # there is none of that name
        return "Ctrl+O shows those there are"
    if config.offline:
        return "Ctrl+O shows those that are here; without --offline it can be downloaded"
    return f"/model {name} downloads it, Ctrl+O shows others"
