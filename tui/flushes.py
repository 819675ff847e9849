"""What it costs to show the next characters of an answer that is long already."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from textual.app import App, ComposeResult

from ferrum_mlx.chat.conversation import Message

from .answer import Answer
from .transcript import Transcript

_LINES = {
    "paragraphs": "A line of a paragraph with some **bold** words in it, number {i}.\n\n",
    "a list": "- an item with some `code` in it, number {i}\n",
    "a nested list": "{i}. an item\n   - and another below it\n",
    "code": "    value = compute({i}, 'text')  # a comment\n",
    "a table": "| cell {i} | another cell | 12.5 |\n",
    "a quote": "> a line of a quote, number {i}\n",
}
_BEFORE = {"code": "```python\n", "a table": "| a | b | c |\n|---|---|---|\n"}
KINDS = tuple(_LINES)
_CHUNK = 12  # characters of a flush
_SAMPLES = 12
_SETTLED_S = 0.03  # a screen draws 60 times a second


class _Screen(App[None]):
    CSS_PATH = ["css/transcript.tcss", "css/markdown.tcss"]  # noqa: RUF012 - declared so by Textual

    def __init__(self) -> None:
        super().__init__()
        self.transcript = Transcript()
        self.answer = Answer(Message(id=1, parent=None, role="assistant"))

    def compose(self) -> ComposeResult:
        yield self.transcript


def flush_seconds(kind: str, lines: int) -> float:
    """CPU seconds of one flush, layout and paint included, behind that many lines.

    The median over lines, each with its share of what the end of a line or block costs.
    """
    return asyncio.run(_measure(kind, lines))


async def _measure(kind: str, lines: int) -> float:
    app = _Screen()
    line = _LINES[kind]
    before = _BEFORE.get(kind, "") + "".join(line.format(i=i) for i in range(lines))
    async with app.run_test(size=(100, 36)) as pilot:
        await app.transcript.add(app.answer)
        for start in range(0, len(before), 200):
            await app.answer.add(before[start : start + 200])
            await pilot.pause(0)
        await pilot.pause()
        taken: list[float] = []
        for number in range(lines, lines + _SAMPLES):
            more = line.format(i=number)
            chunks = [more[start : start + _CHUNK] for start in range(0, len(more), _CHUNK)]
            began = time.process_time()
            for chunk in chunks:
                await app.answer.add(chunk)
                await asyncio.sleep(_SETTLED_S)
            taken.append((time.process_time() - began) / len(chunks))
        return median(taken)
