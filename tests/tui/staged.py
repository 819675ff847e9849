"""The whole screen with nothing in it that changes from one run to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.messages import Delta, Finished, Ready
from ferrum_mlx.metrics import RequestStats, Timings, Usage
from ferrum_tui.app import ChatApp
from ferrum_tui.screens import listing

from .driver import GREEDY, until
from .engine_readings import Client, busy, ready

NOON = 1_767_268_800.0  # 2026-01-01 12:00 UTC
USAGE, TIMINGS = Usage(36, 214, 32), Timings(0.412, 1842.0, 48.7)
ANSWER = """A block table maps logical positions to **physical** KV blocks:

1. Split the sequence into 16-token blocks.
2. Hash each full block together with its parent's `hash`.

```python
class BlockTable:
    def append(self, block: int) -> None:  # one more
        self.blocks.append(block)
```

| glyph | blocks |
|---|---|
| █ | used |
| ░ | cached, 漢字 |

> See [the docs](https://example.org).
"""


class StagedClient(Client):
    """An engine that is ready at once and says what its `answers` say, in their order."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.config = EngineConfig(backend="fake")
        self.ready = None
        self.answers = answers
        self.on_note: Callable[[str], None] | None = None

    def start(self) -> Ready:
        self.ready = ready(notes=(), speculation="")
        return self.ready

    def close(self) -> None:
        pass

    def submit(self, *args: object, **options: object) -> StagedStream:
        return StagedStream(self.answers.pop(0))


class StagedStream:
    """One answer, all at once."""

    def __init__(self, text: str) -> None:
        stats: dict[str, Any] = dict.fromkeys((field.name for field in fields(RequestStats)), 0)
        stats |= {"finish_reason": "stop", "usage": USAGE, "timings": TIMINGS}
        end = Finished("1", RequestStats(**stats))
        self._events: list[Delta | Finished] = [Delta("1", text, (1, 2)), end]

    def drain(self) -> list[Delta | Finished]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pass


def freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every clock says noon; the memory and the settings file are nobody's own."""
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(NOON))
    monkeypatch.setattr(listing, "memory_fit", lambda _: _Room())
    monkeypatch.setenv("FERRUM_CONFIG", "/home/you/.config/ferrum/config.toml")


class _Room:
    needed_bytes, available_bytes, fits = 3_200_000_000, 5_100_000_000, True


def conversation() -> Conversation:
    """One prompt, and two answers to it."""
    conversation = Conversation(title="block tables")
    asked = conversation.add("user", "Explain the block table.", parent=None)
    for text in ("A first try.", ANSWER):
        answer = conversation.add("assistant", text, parent=asked.id)
        answer.model, answer.ending, answer.usage, answer.timings = "Qwen3-8B", "stop", USAGE, TIMINGS
    answer.thinking, answer.thought_s = "The user wants a table.\nAnd a sketch.", 3.1
    conversation.leaf = answer.id
    return conversation


def staged(folder: Path, opened: Conversation | None, theme: str = "") -> ChatApp:
    """An app with that conversation; two more are kept in a store in `folder`."""
    store = Store(folder / "sessions.db")
    for title in ("a lighthouse", "漢字 and more"):
        kept = replace(conversation(), title=title)
        store.keep(kept)
    client = StagedClient(["The one answer.", "The *other* answer."])
    config = EngineConfig(model="qwen3-8b", backend="fake", offline=True)
    make: Any = lambda *_: client  # noqa: E731
    app = ChatApp(config, GREEDY, make_client=make, store=store, conversation=opened)
    app.settings = replace(app.settings, theme=theme)
    app.animation_level = "none"
    return app


async def at_rest(pilot: Pilot[Any]) -> None:
    """Nothing moves any more: no cursor blinks, no timer runs."""
    app: Any = pilot.app
    app._timer.pause()
    app.desk.show_status()
    await app.feed.refresh()
    await until(pilot, lambda: app.feed.view is not None and app.feed._asking is None)
    app.show_setup()
    for widget in app.screen.query(TextArea):
        widget.cursor_blink = False
    for field in app.screen.query(Input):
        field.cursor_blink = False
    await pilot.pause()
    await pilot.pause()


async def at_work(app: ChatApp) -> None:
    """The readings of a busy engine, and half a minute of its past."""
    now = [100.0]
    readings = busy()
    client: Any = app.host.client
    app.feed._clock = lambda: now[0]
    app.feed.attach(client)
    for number in range(120):
        now[0] += 0.25
        client.work(12 if number % 20 else 6, admitted_tokens=0, cached_tokens=0)
        client.answer, client.sums.latest_ttft_s = readings.answer, readings.sums.latest_ttft_s
        await app.feed.refresh()
