"""A conversation and the file that keeps it. Where the file fails, the chat goes on unkept."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ferrum_mlx.chat.conversation import Conversation, Message
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError, SessionsBusyError

_KEEP_EVERY = 1.0  # seconds of a growing answer that a crash may lose


class Book:
    """A conversation in hand. What another process keeps from being written waits its turn.

    Args:
        store: None keeps nothing.
        tell: is given the reason when keeping fails, for ever or (SessionsBusyError) for now; each once.

    Attributes:
        waiting: something is not written yet; `retry`, and whatever is kept next, tries again.
    """

    def __init__(
        self, conversation: Conversation, store: Store | None, tell: Callable[[FerrumError], None]
    ) -> None:
        self.conversation = conversation
        self.store = store
        self._tell = tell
        self._kept_at = 0.0
        self._todo: list[Callable[[Store], None]] = []
        self.waiting = False

    def keep(self, *messages: Message) -> None:
        """Write messages as they stand now, and the leaf."""
        self._kept_at = monotonic()
        self._try(lambda store: store.save(self.conversation, *messages))

    def keep_growing(self, message: Message) -> None:
        """Keep an answer that comes, once a second."""
        if monotonic() - self._kept_at < _KEEP_EVERY:
            return
        if self.waiting:  # for a turn in which all of its text is written
            self._kept_at = monotonic()
            self.retry()
        else:
            self.keep(message)

    def stand_at(self, leaf: int | None, *messages: Message) -> None:
        """Where the conversation goes on, also when it is resumed; kept in one with these messages."""
        self.conversation.leaf = leaf
        if messages:
            self.keep(*messages)
        else:
            self._try(lambda store: store.save_head(self.conversation, "leaf"))

    def rename(self, title: str) -> None:
        self.conversation.title = title
        self._try(lambda store: store.save_head(self.conversation, "title"))

    def set_system(self, text: str) -> None:
        """Another system message; "" is none."""
        self.conversation.system = text
        self._try(lambda store: store.save_head(self.conversation, "system"))

    def drop(self, message: Message) -> None:
        """Take back a message that has none below it."""
        self.conversation.remove(message.id)
        self._try(lambda store: store.remove(self.conversation, message.id))

    def retry(self) -> None:
        """Write what waits, in the order it came."""
        while self._todo and self.store is not None:
            try:
                self._todo[0](self.store)
            except SessionsBusyError as error:
                if not self.waiting:
                    self.waiting = True
                    self._tell(error)
                return
            except FerrumError as error:
                self.store = None
                self._tell(error)
            else:
                del self._todo[0]
        self._todo.clear()
        self.waiting = False

    def _try(self, what: Callable[[Store], None]) -> None:
        self._todo.append(what)
        self.retry()
