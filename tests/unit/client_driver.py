"""Configurations, requests and waits that the tests of EngineClient share."""

from __future__ import annotations

import time
from collections.abc import Callable

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.messages import Command, Delta
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.stream import RequestStream
from ferrum_mlx.transport import Post

Make = Callable[[EngineConfig], EngineClient]
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


def wait_until_idle(client: EngineClient) -> None:
    """See that nothing runs and that no block is left in use."""
    until(lambda: client.last_step is not None and client.last_step.kv.used_blocks == 0)
    assert client.last_step is not None
    assert (client.last_step.running, client.last_step.waiting) == (0, 0)


class Scripted:
    """A transport without an engine: the test posts what it would say."""

    posts: list[Post]

    def __init__(self, config: EngineConfig, post: Post) -> None:
        self.posts.append(post)

    def send(self, command: Command) -> None: ...

    def stop(self, patience: float) -> None: ...
