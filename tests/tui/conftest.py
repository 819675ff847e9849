"""A screen in front of a real engine whose words are scripted and may be held back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ferrum_mlx import build, hub_fetch
from ferrum_mlx.backends.fake import EOS, FakeCodec, FakeExecutor
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_tui.app import ChatApp

from .driver import GREEDY
from .slow_hub import SlowHub


class Stage:
    """What the engine says, and when.

    Attributes:
        answers: texts by prompt; a prompt that is not there is answered by "ok".
        held: while set, each token waits for one `allow`.
        crash: raised by the next step, once; where `crashing` names a model, by a step of its engine.
        build_error: raised by the next build, once.
        seen: the conversations that reached the engine, as one text each.
        configs: of each build, in their order.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.held = False
        self.crash: BaseException | None = None
        self.crashing = ""
        self.build_error: FerrumError | None = None
        self.notes: tuple[str, ...] = ()
        self.builds = 0
        self.seen: list[str] = []
        self.configs: list[EngineConfig] = []
        self.may_build = threading.Event()
        self.may_build.set()
        self._allowed = threading.Semaphore(0)

    def allow(self, tokens: int) -> None:
        self._allowed.release(tokens)

    def release(self) -> None:
        """Hold nothing back any more."""
        self.held = False
        self.allow(1)

    def build(self, config: EngineConfig, narrate: Callable[[str], None]) -> Engine:
        self.builds += 1
        self.configs.append(config)
        narrate("loading the script")
        self.may_build.wait()
        if self.build_error is not None:
            error, self.build_error = self.build_error, None
            raise error
        executor = FakeExecutor(config, self._say)
        executor.prepare_startup()
        engine = Engine(
            executor, FakeCodec(), config, backend="fake", backend_reason="a test", notes=self.notes
        )
        step = engine.step

        def step_or_crash() -> list[object]:
            if self.crash is not None and self.crashing in ("", config.model):
                crash, self.crash = self.crash, None
                raise crash
            return list(step())

        engine.step = step_or_crash  # type: ignore[method-assign, assignment]
        return engine

    def _say(self, tokens: Sequence[int], sampling: RowSampling) -> int:
        if self.held:
            self._allowed.acquire()
        conversation = bytes(
            token if token < EOS else 0 for token in tokens[: len(tokens) - sampling.position]
        )
        if sampling.position == 0:
            self.seen.append(conversation.decode())
        prompt = conversation.rsplit(b"\0", 1)[-1].decode()
        answer = self.answers.get(prompt, "ok").encode()
        return answer[sampling.position] if sampling.position < len(answer) else EOS


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()
    monkeypatch.setattr(build, "build_engine", stage.build)
    yield stage
    stage.may_build.set()
    stage.release()


@pytest.fixture
def app(stage: Stage) -> ChatApp:
    return ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread)


@pytest.fixture
def slow_hub(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowHub]:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    slow = SlowHub(fake_hub)

    make = hub_fetch._Count

    def count(here: int) -> hub_fetch._Count:
        slow.counts.append(make(here))
        return slow.counts[-1]

    monkeypatch.setattr(hub_fetch, "_Count", count)
    yield slow
    slow.go.set()
