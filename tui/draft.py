"""What a draft with files in it would cost: its tokens, counted as the user writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.timer import Timer

from ferrum_mlx.chat.attachments import attach
from ferrum_mlx.client import EngineClient
from ferrum_mlx.errors import FerrumError

from .prompt import Prompt

_QUIET = 0.3  # seconds after the last letter until it is counted


class DraftCount:
    """Counts behind the screen's back, as the engine answers between two steps only.

    Args:
        client: gives the one to ask.
        changed: called when `said` is another.

    Attributes:
        said: the tokens and the files; "" where there are no files, or nobody can count.
    """

    def __init__(
        self, prompt: Prompt, client: Callable[[], EngineClient], changed: Callable[[], None]
    ) -> None:
        self.said = ""
        self._prompt, self._client, self._changed = prompt, client, changed
        self._pause: Timer | None = None

    def look(self) -> None:
        """The draft is another."""
        if self._pause is not None:
            self._pause.stop()
        if "@" in self._prompt.text:
            self._pause = self._prompt.set_timer(_QUIET, self._begin)
        else:
            self._say("")

    def _begin(self) -> None:
        self._prompt.run_worker(self._count(self._prompt.text), group="draft", exclusive=True)

    async def _count(self, text: str) -> None:
        try:
            said = await asyncio.to_thread(_counted, text, self._client())
        except FerrumError:  # sending it will tell
            said = ""
        if text == self._prompt.text:
            self._say(said)

    def _say(self, what: str) -> None:
        if what != self.said:
            self.said = what
            self._changed()


def _counted(text: str, client: EngineClient) -> str:
    attached = attach(text)
    if not attached.names:
        return ""
    tokens = client.count_tokens([{"role": "user", "content": attached.text_for_model}])
    return f"{tokens:,} tok with {', '.join(attached.names)}"
