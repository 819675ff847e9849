"""Two models in a comparison: how their engines share the memory for KV.

An engine's pool never shrinks. So the first one, where it holds more than its half, starts again with half.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ferrum_mlx.chat.other_model import for_model
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.fit import free_here, route_here
from ferrum_mlx.plain import size

from .host import EngineHost

if TYPE_CHECKING:
    from .app import ChatApp

_HALF = 0.5


async def compare_models(app: ChatApp, other: str) -> None:
    """Begin a comparison with another model, in an engine of its own."""
    await end(app, stays=False)
    if app.host.config.memory_share > _HALF and holds_more_than_half(app.host):
        await replace_engine(app, replace(app.host.config, memory_share=_HALF))
        said = f"{app.host.model} starts again with half of the memory for KV"
    else:
        said = (
            f"{app.host.model} keeps its KV pool, {_pool(app.host)}, no more than half of the memory for KV"
        )
    config, behind = for_model(app.host.config, other)
    host = app.new_host(replace(config, memory_share=_HALF))
    await app.desk.compare(host, replace(app.desk.talk.setup, adapter=""), app.host.model, host.model)
    await app.desk.talk.note(f"{said}; {host.model} gets the other half")
    for line in behind:
        await app.desk.talks[-1].note(line)
    host.start(after=app.host)


async def end(app: ChatApp, *, stays: bool = True) -> None:
    """Back to one transcript; the other one's answers stay as branches.

    Args:
        stays: the engine that is left goes on, with the half that it may have; that is said.
    """
    host = await app.desk.end_comparison()
    if host is None:
        return
    await host.close()
    if stays:
        app.call_later(_tell_half, app)  # what opens meanwhile takes no note away


async def replace_engine(app: ChatApp, config: EngineConfig) -> None:
    """Go on with another engine; the one before it ends first, there may be no room for two."""
    before = app.host
    app.host = app.new_host(config, before=before.config if before.state == "ready" else before.before)
    app.desk.talk.host = app.host
    app.feed.attach(app.host.client)
    app.show_setup()
    await before.close()
    app.host.start()


def holds_more_than_half(host: EngineHost) -> bool:
    """Whether the engine would be given less if it were started now, with half of the memory.

    Of what is free, as of what --kv-memory allows, a pool gets its share; build_speculation has the rule.
    """
    ready = host.client.ready
    free = free_here(route_here(host.config.backend))
    if ready is None or free is None:
        return True
    allowed = host.config.kv_memory or free // 2
    return ready.memory.kv_pool_bytes > _HALF * allowed


async def _tell_half(app: ChatApp) -> None:
    if app.host.config.memory_share < 1:
        name = app.host.config.model or app.host.model
        await app.desk.talk.note(
            f"{app.host.model} has half of the memory for KV; /model {name} gives it all"
        )


def _pool(host: EngineHost) -> str:
    ready = host.client.ready
    return size(ready.memory.kv_pool_bytes) if ready else ""
