"""The transcripts on screen: one, or two side by side over the same conversation."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message as Event

from ferrum_mlx.chat.attachments import Attached
from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.errors import UsageError

from .host import EngineHost
from .message import MessageEvent, MessageWidget
from .talk import Setup, Talk

_BUSY = "An answer is still coming; Esc stops it."
_MOMENT = 0.1  # seconds, in which a suspected Esc is sure, and told to the engine by a busy screen


class Desk(Horizontal):
    """What a user does to a conversation. The left transcript is there always."""

    class Begun(Event):
        """An answer is awaited from now on."""

    class Editing(Event):
        """A prompt is brought back to be changed."""

    def __init__(self, host: EngineHost, book: Book, setup: Setup) -> None:
        super().__init__()
        self.talks = [Talk(host, book, setup)]

    def compose(self) -> ComposeResult:
        yield from self.talks

    @property
    def talk(self) -> Talk:
        """The one, or the left one."""
        return self.talks[0]

    @property
    def hosts(self) -> list[EngineHost]:
        return list(dict.fromkeys(talk.host for talk in self.talks))

    @property
    def editing(self) -> Message | None:
        return next((talk.editing for talk in self.talks if talk.editing), None)

    @property
    def answering(self) -> bool:
        return any(talk.turn for talk in self.talks)

    @property
    def busy(self) -> bool:
        """An answer is awaited, or an engine has not yet told that it is done with the last one."""
        steps = [host.client.last_step for host in self.hosts if host.client.ready]
        return self.answering or any(step.running or step.waiting for step in steps if step)

    def of(self, host: EngineHost) -> list[Talk]:
        return [talk for talk in self.talks if talk.host is host]

    async def ask(self, text: str, attached: Attached) -> bool:
        """Send a prompt to every transcript, or to the one that edits one; False while one is busy."""
        talks = [talk for talk in self.talks if talk.editing] or self.talks
        if not all(map(self._idle, talks)):
            return False
        asked: dict[int | None, Message] = {}  # by what is above it: two transcripts may be one branch so far
        for talk in talks:
            end = talk.end
            if end not in asked:
                asked[end] = _asked(talk.book, text, attached, end)
            await talk.ask(asked[end])
        self.post_message(self.Begun())
        return True

    async def drain(self) -> None:
        for talk in self.talks:
            await talk.drain()

    def hold(self) -> None:
        """Have what answers wait for a moment: it may be told to stop. From any thread."""
        if self.answering:
            for host in self.hosts:
                host.client.hold(_MOMENT)

    async def stop(self) -> None:
        for talk in self.talks:
            await talk.stop()

    def show_status(self) -> None:
        for talk in self.talks:
            talk.show_status()

    async def compare(self, host: EngineHost, setup: Setup, here: str, label: str) -> None:
        """Begin a comparison: a second transcript, which answers the same prompts in its own way.

        Args:
            here, label: name what is different in the one and the other.
        """
        self.talk.tell_apart(here)
        other = Talk(host, self.talk.book, setup, label=label, first=False)
        other.leaf = self.talk.leaf
        self.talks.append(other)
        await self.mount(other)
        await other.show()

    async def end_comparison(self) -> EngineHost | None:
        """Back to the left one; answers of the right one stay as branches. Returns a host left over."""
        if len(self.talks) == 1:
            return None
        other = self.talks.pop()
        await other.abandon()
        await other.remove()
        self.talk.tell_apart("")
        if self.talk.turn is None:
            await self.talk.show()  # the number of branches has changed
        return other.host if other.host is not self.talk.host else None

    def cancel_edit(self) -> None:
        for talk in self.talks:
            talk.editing = None

    def edit(self, talk: Talk, message: Message) -> None:
        """Bring a prompt back; the next one that is sent goes beside it."""
        self.cancel_edit()
        talk.editing = message
        self.post_message(self.Editing())

    async def again(self, talk: Talk, message_id: int | None = None) -> None:
        if self._idle(talk):
            await talk.regenerate(message_id)
            self.post_message(self.Begun())

    async def go_on(self, talk: Talk, message_id: int | None = None) -> None:
        if self._idle(talk):
            await talk.go_on(message_id)
            self.post_message(self.Begun())

    async def go_to(self, talk: Talk, leaf: int) -> None:
        if self._idle(talk):
            await talk.go_to(leaf)

    def require_idle(self) -> None:
        """Raises UsageError while an answer comes."""
        if self.answering:
            raise UsageError(_BUSY)

    def _idle(self, talk: Talk) -> bool:
        if talk.turn is not None:
            talk.post_message(Talk.Told(_BUSY))
        return talk.turn is None

    @on(MessageWidget.Edit)
    def _edit(self, event: MessageWidget.Edit) -> None:
        talk = self._talk_of(event)
        self.edit(talk, talk.book.conversation.messages[event.message_id])

    @on(MessageWidget.Regenerate)
    async def _regenerate(self, event: MessageWidget.Regenerate) -> None:
        await self.again(self._talk_of(event), event.message_id)

    @on(MessageWidget.Continue)
    async def _continue(self, event: MessageWidget.Continue) -> None:
        await self.go_on(self._talk_of(event), event.message_id)

    @on(MessageWidget.Branch)
    async def _walk(self, event: MessageWidget.Branch) -> None:
        talk = self._talk_of(event)
        conversation = talk.book.conversation
        there = conversation.beside(event.message_id, event.step)
        if there != event.message_id:
            await self.go_to(talk, conversation.end_below(there))

    def _talk_of(self, event: MessageEvent) -> Talk:
        return next(talk for talk in self.talks if talk in event.widget.ancestors)


def _asked(book: Book, text: str, attached: Attached, parent: int | None) -> Message:
    message = book.conversation.add("user", text, parent=parent)
    if attached.text_for_model != text:
        message.sent, message.attached = attached.text_for_model, attached.names
    return message
