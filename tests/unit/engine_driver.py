"""An engine over the fake backend, and what to ask of its events."""

from __future__ import annotations

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Submit
from ferrum_mlx.sampling import SamplingParams


def make(script=None, **settings) -> Engine:
    config = EngineConfig(**({"block_size": 4, "max_model_len": 64} | settings))
    executor = FakeExecutor(config) if script is None else FakeExecutor(config, script)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test")


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work():
        events += engine.step()
    assert engine.executor.kv_capacity_snapshot().used_blocks == 0
    return events


def text_of(events: list[Event], request_id: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.request_id == request_id)


def ids_of(events: list[Event], request_id: str) -> list[int]:
    return [t for e in events if isinstance(e, Delta) and e.request_id == request_id for t in e.token_ids]


def end_of(events: list[Event], request_id: str) -> Finished | Failed:
    (end,) = [e for e in events if isinstance(e, (Finished, Failed)) and e.request_id == request_id]
    return end


def say(engine: Engine, prompt, name: str = "r", **params) -> list[Event]:
    engine.submit(Submit(name, prompt, SamplingParams(**params)))
    return drain(engine)
