"""A conversation as a tree of messages: an edited prompt or a second answer is a branch beside the first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from ferrum_mlx.messages import ChatMessage
from ferrum_mlx.metrics import Timings, Usage

Role = Literal["user", "assistant"]
# How an answer stands: "" while it comes (or where the program died over it), "broken" by an error.
Ending = Literal["", "stop", "length", "abort", "broken"]


@dataclass(slots=True, kw_only=True)
class Message:
    """One message; the text of an answer grows while it comes.

    Attributes:
        id: its place in the conversation, counted from 1.
        parent: id of the message before it; None of a first one.
        created: seconds since the epoch.
        thinking: what a reasoning model said to itself; it does not go back to the model.
        thought_s: seconds that took, from when the first of it was shown until the answer began; 0 is not
            known.
        model: who answered; "" of a prompt.
        label: what tells the answer from its siblings, such as the settings of a comparison.
        attached: names of the files that a prompt quotes; their text is part of `sent`.
        sent: what the model is given for a prompt where it is not `text`.
        usage, timings: of a finished answer.
    """

    id: int
    parent: int | None
    role: Role
    text: str = ""
    created: float = field(default_factory=time.time)
    thinking: str = ""
    thought_s: float = 0.0
    model: str = ""
    label: str = ""
    ending: Ending = ""
    attached: tuple[str, ...] = ()
    sent: str = ""
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def came_to_nothing(self) -> bool:
        """An answer that was ended before its first word; one that the model itself left empty is whole."""
        whole = self.role == "user" or self.ending in ("stop", "length")
        return not (whole or self.text or self.thinking)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages by id, in the order they were made. Plain data; `Store` keeps it.

    Attributes:
        id: the store's; None until it is kept.
        title: the user's, or the first prompt's beginning.
        system: the system message; "" is none.
        leaf: the message at whose end the conversation stands; None while it is empty.
    """

    id: int | None = None
    title: str = ""
    system: str = ""
    messages: dict[int, Message] = field(default_factory=dict)
    leaf: int | None = None

    def add(self, role: Role, text: str = "", *, parent: int | None) -> Message:
        """A new message below `parent` (None: a new beginning). The leaf stays where it is."""
        message = Message(id=max(self.messages, default=0) + 1, parent=parent, role=role, text=text)
        self.messages[message.id] = message
        return message

    def copy(self, message: Message) -> Message:
        """The same message once more, beside it; none is below it."""
        copied = replace(message, id=max(self.messages) + 1)
        self.messages[copied.id] = copied
        return copied

    def path(self, leaf: int | None) -> list[Message]:
        """The messages from the beginning to `leaf`, which is among them."""
        path = []
        while leaf is not None:
            path.append(self.messages[leaf])
            leaf = path[-1].parent
        return path[::-1]

    def last_answer(self, leaf: int | None) -> int | None:
        """The id of the last answer on the path to `leaf`: a prompt goes below one, never below a prompt."""
        return next((message.id for message in self.path(leaf)[::-1] if message.role == "assistant"), None)

    def siblings(self, message_id: int) -> list[Message]:
        """The message and those that stand beside it, oldest first."""
        return list(self._below(self.messages[message_id].parent))

    def beside(self, message_id: int, steps: int) -> int:
        """The id of the sibling that many places on; at either end, the last there is."""
        siblings = [message.id for message in self.siblings(message_id)]
        return siblings[min(max(siblings.index(message_id) + steps, 0), len(siblings) - 1)]

    def end_below(self, message_id: int) -> int:
        """The leaf that the newest messages below `message_id` lead to."""
        while below := [message.id for message in self._below(message_id)]:
            message_id = below[-1]
        return message_id

    def has_below(self, message_id: int) -> bool:
        return any(self._below(message_id))

    def remove(self, message_id: int) -> None:
        """Take a message out that has none below it."""
        assert not self.has_below(message_id)
        del self.messages[message_id]

    def drop_what_came_to_nothing(self) -> None:
        """Take out answers that nothing came of and nothing is below; their prompts stay, unanswered."""
        for answer in [message for message in self.messages.values() if message.came_to_nothing]:
            if answer.parent is None or self.has_below(answer.id):
                continue
            if self.leaf == answer.id:
                self.leaf = answer.parent
            self.remove(answer.id)

    def for_model(self, leaf: int | None) -> list[ChatMessage]:
        """What a chat template is given for the path to `leaf`.

        A prompt of which nothing came is left out with its answer: no two prompts stand in a row, and
        no answer is empty that the model has not left so.
        """
        said: list[Message] = []
        for message in self.path(leaf):
            if not message.came_to_nothing:
                said.append(message)
            elif said and said[-1].role == "user":
                said.pop()
        opening: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return opening + [{"role": message.role, "content": message.sent or message.text} for message in said]

    def _below(self, parent: int | None) -> Iterator[Message]:
        return (message for message in self.messages.values() if message.parent == parent)
