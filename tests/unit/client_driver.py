"""Configurations, requests and waits that the tests of EngineClient share."""

from __future__ import annotations

import time
from collections.abc import Callable

from ferrum_mlx.client import RequestStream
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.messages import Delta
from ferrum_mlx.sampling import SamplingParams

FAKE = EngineConfig(backend="fake")
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)  # as long as the context: longer than any test waits
LONG_CONTEXT = EngineConfig(backend="fake", max_model_len=200_000)
WAIT = 60.0  # seconds before a test gives up; never a measure of speed


def text_of(stream: RequestStream) -> str:
    return "".join(event.text for event in stream if isinstance(event, Delta))


def first_delta(stream: RequestStream) -> Delta:
    return next(event for event in stream if isinstance(event, Delta))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
