"""A view into the engines behind the clients under test."""

from __future__ import annotations

import pytest

from ferrum_mlx import build
from ferrum_mlx.engine import Engine

from .client_driver import FAKE


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
