"""Questions to an engine that wait for their answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Answer, Ask, Question

_NAMES = {"AskKVMap": "KV map", "AskView": "view", "AskTokenCount": "token count"}


class Questions:
    """Kept under the lock of `changed`, which every caller holds; an answer wakes who waits for it."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answer | None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._answers)

    def ask(self, question: Question, send: Callable[[Ask], None], timeout: float) -> Answer:
        """Wait for the answer, with the lock given up meanwhile.

        Raises:
            FerrumError: what came in its place, or that nothing did within `timeout` seconds.
        """
        number = next(self._numbers)
        self._answers[number] = None
        send(Ask(number, question))
        try:
            self._changed.wait_for(lambda: self._answers[number] is not None, timeout)
        finally:
            answer = self._answers.pop(number)
        if answer is None:
            what = _NAMES[type(question).__name__]
            raise FerrumError(f"the engine gave no {what} within {timeout:g} s", next_step="ask again later")
        if isinstance(answer, FerrumError):
            raise answer
        return answer

    def answer(self, number: int, answer: Answer) -> None:
        if number in self._answers:  # else nobody waits for it any more
            self._answers[number] = answer
            self._changed.notify_all()

    def answer_all(self, error: FerrumError) -> None:
        """The engine is gone."""
        for number in self._answers:
            self.answer(number, error)
