"""Clients of both transports, and a view into the engines behind them; a machine without network."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import NoReturn

import pytest

from ferrum_mlx import build
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Ready

from .client_driver import FAKE, WAIT, Make


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that this process builds."""
    engines: list[Engine] = []

    def building(*args: object) -> Engine:
        engines.append(real_build(FAKE))
        return engines[-1]

    real_build = build.build_engine
    monkeypatch.setattr(build, "build_engine", building)
    return engines


@pytest.fixture(params=["thread", "process"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients; whatever is left of them is closed."""
    made: list[EngineClient] = []
    form = EngineClient.in_thread if request.param == "thread" else EngineClient.in_process

    def make(config: EngineConfig) -> EngineClient:
        made.append(form(config))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def announced() -> Ready:
    """What an engine says when it is ready."""
    with EngineClient.in_thread(FAKE) as client:
        return client.start(WAIT)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
