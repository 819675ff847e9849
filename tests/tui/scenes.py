"""What the pictures show: a conversation, models, sessions and an engine's readings, the same everywhere."""

from __future__ import annotations

import time
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.store import Store
from ferrum_mlx.fit import Fit
from ferrum_mlx.metrics import Timings, Usage
from ferrum_tui.app import ChatApp
from ferrum_tui.screens import listing
from ferrum_tui.status import Status

from .driver import ready, until
from .engine_readings import busy

NOW = time.mktime((2026, 3, 5, 14, 2, 0, 0, 0, -1))  # 14:02, whatever the time zone
DONE = Status("ready", "", 214, 48.7, 0.412)
ANSWER = """\
# Block tables

A block table maps *logical* positions to **physical** KV blocks, see `kv/manager.py`:

1. Split the sequence into 16-token blocks.
2. Hash each full block together with its parent's hash, so that equal prefixes are found again.
   - 块表 means block table; 🚀 is two cells wide

```python
class BlockTable:
    def slot(self, position: int) -> int:
        return self.blocks[position // 16] * 16 + position % 16
```

| block | state | used by |
|---|---|---:|
| 0 | shared | 3 |
| 1 | 空き | 0 |

> Nothing is copied until somebody writes.
"""
OTHER = """\
Think of a **library card**: it names the shelf, the shelf keeps the book.

```text
position 37 -> block 2 -> slot 5
```
"""


def conversation() -> Conversation:
    """A prompt with a file, and two answers of which the first is on screen."""
    made = Conversation(title="block tables, explained [draft]")
    asked = made.add("user", "Explain the block table and give me a Python sketch.", parent=None)
    asked.attached = ("notes.md",)
    first, second = (made.add("assistant", text, parent=asked.id) for text in (ANSWER, OTHER))
    first.thinking, first.thought_s = "The user wants a table.\nAnd a sketch of it.", 3.1
    first.ending, second.ending = "stop", "length"
    _figures(first, 1024, 512)
    _figures(second, 1024, 1008)
    for message in (asked, first, second):
        message.created = NOW
    made.leaf = first.id
    return made


def _figures(answer: Message, prompt: int, cached: int) -> None:
    answer.model = "Qwen3-8B"
    answer.usage = Usage(prompt_tokens=prompt, completion_tokens=214, cached_tokens=cached)
    answer.timings = Timings(ttft_s=0.412, prefill_tps=1842.0, decode_tps=48.7)


def models() -> list[listing.Entry]:
    """One of each kind that a list may have."""
    roomy, tight, none = _room(2), _room(9), _room(40)
    return [
        _entry("smollm2-135m", "SmolLM2 135M Instruct", 98, roomy, here=True),
        _entry("qwen3-0.6b", "Qwen3 0.6B", 397, roomy, partial=120),
        _entry("qwen3-8b", "Qwen3 8B", 4608, tight),
        _entry("llama-3.3-70b-instruct", "Llama 3.3 70B Instruct", 39_600, none, licence="llama3.3"),
        _entry("somebody/a-model-with-a-long-name-4bit", "", 1200, None, here=True, card=False),
    ]


def _room(needed_gb: int) -> Fit:
    return Fit(needed_gb * 10**9, 10**10, needed_gb < 10, "")


def _entry(
    name: str,
    title: str,
    megabytes: int,
    fit: Fit | None,
    *,
    here: bool = False,
    partial: int = 0,
    licence: str = "Apache-2.0",
    card: bool = True,
) -> listing.Entry:
    return listing.Entry(
        name=name,
        title=title,
        size=megabytes * 10**6,
        here=here,
        partial=partial * 10**6,
        fit=fit,
        licence=licence if card else "",
        context=40_960 if card else None,
        verified=here and card,
    )


def sessions(store: Store) -> int:
    """Fill a store; returns the session in hand."""
    for title in ("Rust, and how to remove it", "漢字 and other wide letters", "a very long title " * 8):
        kept = conversation()
        kept.title = title.strip()
        store.keep(kept)
    assert kept.id is not None
    return kept.id


def still(pilot: Pilot[Any]) -> None:
    """No cursor blinks."""
    for box in pilot.app.screen.query("Input, TextArea"):
        assert isinstance(box, Input | TextArea)
        box.cursor_blink = False


async def with_readings(pilot: Pilot[ChatApp]) -> None:
    """The engine is ready and, for all that the screen says, hard at work."""
    await ready(pilot)
    feed, now = pilot.app.feed, 0.0
    client = busy()
    feed._clock = lambda: now
    feed.attach(client)  # type: ignore[arg-type]
    for quarter in range(240):
        now += 0.25
        speculation = client.last_step.speculation if client.last_step else None
        client.work(9 + quarter % 7, speculation=speculation, prefill_tokens=450 * (quarter % 40 < 4))
        feed._take(client.ready, client.last_step)
    await feed.refresh()
    await until(pilot, lambda: feed.view is not None)
    for talk in pilot.app.desk.talks:
        talk.status_line.status = DONE
    still(pilot)
