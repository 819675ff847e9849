"""A conversation and the file that keeps it. Where the file fails, the chat goes on unkept."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ferrum_mlx.chat.conversation import Conversation, Message, Role
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError

_KEEP_EVERY = 1.0  # seconds of a growing answer that a crash may lose


class Book:
    """A conversation in hand.

    Args:
        store: None keeps nothing.
        tell: is given the reason when keeping fails, once.
    """

    def __init__(
        self, conversation: Conversation, store: Store | None, tell: Callable[[FerrumError], None]
    ) -> None:
        self.conversation = conversation
        self.store = store
        self._tell = tell
        self._kept_at = 0.0

    def add(self, role: Role, text: str = "", *, parent: int | None) -> Message:
        """A new message, kept at once."""
        message = self.conversation.add(role, text, parent=parent)
        self.keep(message)
        return message

    def keep(self, message: Message) -> None:
        """Write a message as it stands now."""
        self._kept_at = monotonic()
        self._try(lambda store: store.save(self.conversation, message))

    def keep_growing(self, message: Message) -> None:
        """Keep an answer that comes, once a second."""
        if monotonic() - self._kept_at >= _KEEP_EVERY:
            self.keep(message)

    def stand_at(self, leaf: int | None) -> None:
        """Where the conversation goes on, also when it is resumed."""
        self.conversation.leaf = leaf
        self.keep_head()

    def keep_head(self) -> None:
        """Write title, system message and leaf."""
        self._try(lambda store: store.save_head(self.conversation))

    def drop(self, message: Message) -> None:
        """Take back a message that has none below it."""
        self.conversation.remove(message.id)
        self._try(lambda store: store.remove(self.conversation, message.id))

    def _try(self, what: Callable[[Store], None]) -> None:
        if self.store is None:
            return
        try:
            what(self.store)
        except FerrumError as error:
            self.store = None
            self._tell(error)
