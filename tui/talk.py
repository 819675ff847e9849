"""One transcript with one engine: it asks, stops, answers again, walks between branches, goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event

from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import ChatOptions
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.sanitize import sanitize

from .answer import Answer
from .host import EngineHost
from .message import UserMessage
from .notices import Failure, Remark, Unanswered
from .status import Status, StatusLine
from .transcript import Transcript
from .turn import Turn


@dataclass(frozen=True, slots=True)
class Setup:
    """How answers are made."""

    choice: SamplingChoice
    thinking: bool | None = None
    adapter: str = ""  # none


class Talk(Vertical):
    """Several may share a book, each with a leaf of its own.

    Attributes:
        label: names what is different here, in a comparison.
        leaf: the message at whose end this transcript stands.
        editing: the prompt that the next one goes beside.
        turn: the answer in the making.
    """

    class Returned(Event):
        """A prompt of which nothing came goes back to the user."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Told(Event):
        """Something for the user to know that is no part of the conversation."""

        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

    def __init__(
        self, host: EngineHost, book: Book, setup: Setup, *, label: str = "", first: bool = True
    ) -> None:
        super().__init__()
        self.host, self.book, self.setup = host, book, setup
        self._first = first  # of a comparison; where it stands is where a resume goes on
        self.leaf = book.conversation.leaf
        self.editing: Message | None = None
        self.turn: Turn | None = None
        self.transcript = Transcript()
        self.status_line = StatusLine()
        self.tell_apart(label)
        self._drawing = asyncio.Lock()  # an answer: the timer that drains runs beside what keys do
        self._told: FerrumError | None = None  # the last error of a turn: an engine's death is told once

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self.status_line

    @property
    def path(self) -> list[Message]:
        return self.book.conversation.path(self.leaf)

    @property
    def params(self) -> SamplingParams:
        return self.setup.choice.params(self.host.config.model)

    @property
    def tokens(self) -> int:
        """Of the conversation, as the last answer has left it."""
        usages = [message.usage for message in self.path if message.usage]
        return usages[-1].prompt_tokens + usages[-1].completion_tokens if usages else 0

    def tell_apart(self, label: str) -> None:
        """Put what is different here in the title; "" where there is no comparison."""
        self.label = label
        self.transcript.border_title = Content(sanitize(label) or "chat")

    async def show(self) -> None:
        """The whole path, as after a resume."""
        if self.leaf is None:
            await self.transcript.clear(self.host.model, self.host.config)
        else:
            await self.transcript.show(self.path, self._place)
        self.show_status()

    async def open(self, book: Book) -> None:
        """Put another conversation here; what is coming of the one before is kept as far as it is."""
        await self.abandon()
        self.book, self.leaf, self.editing = book, book.conversation.leaf, None
        await self.show()
        if self.path and self.path[-1].role == "user":
            await self.transcript.add(Unanswered())

    # Asking

    @property
    def end(self) -> int | None:
        """The message that the next prompt goes below."""
        here = self.leaf if self.editing is None else self.editing.parent
        return self.book.conversation.last_answer(here)

    async def ask(self, asked: Message) -> None:
        """Answer a new prompt of the book, which is below `end`."""
        await self._begin(self._new_answer(asked), asked)

    async def regenerate(self, message_id: int | None = None) -> None:
        """Another answer beside the given one, or to the last prompt."""
        prompt = self._prompt_of(message_id)
        if prompt is None:
            self.post_message(self.Told("There is no answer yet."))
            return
        await self._begin(self._new_answer(prompt))

    async def go_on(self, message_id: int | None = None) -> None:
        """Continue an answer where it ends; beside it, if something was said to it as it is."""
        answer = self._answer_of(message_id)
        if answer is None or not answer.text:
            self.post_message(self.Told("There is no answer to continue."))
            return
        if self.book.conversation.has_below(answer.id):
            await self._begin(self.book.conversation.copy(answer), continues=True)
        else:
            await self._begin(answer, continues=True, added=False)

    async def go_to(self, leaf: int | None) -> None:
        """To another end of the conversation."""
        self._stand_at(leaf)
        await self._show_to(leaf)

    async def _begin(
        self, answer: Message, asked: Message | None = None, *, continues: bool = False, added: bool = True
    ) -> None:
        widget = Answer(answer, self._place(answer))
        turn = self.turn = Turn(answer, widget, asked, self.leaf, continues, added)
        self.editing = None
        above = answer.parent if asked is None else asked.parent
        self._stand_at(answer.id, *((asked, answer) if asked is not None else (answer,)))
        if above != turn.back_to:
            await self._show_to(above)
        if asked is not None:
            await self.transcript.add(UserMessage(asked, self._place(asked)))
        await self.transcript.add(widget)
        await widget.fill()
        if self.turn is turn:
            self.transcript.follow()
            turn.on_screen = True
            self._submit()
        else:  # it was ended meanwhile
            await self.show()

    def _new_answer(self, prompt: Message) -> Message:
        answer = self.book.conversation.add("assistant", parent=prompt.id)
        answer.model, answer.label = self.host.model, self.label
        return answer

    def _submit(self) -> None:
        """Hand the turn to the engine, if there are both."""
        turn = self.turn
        if turn is None or not turn.on_screen or turn.stream is not None:
            return
        if self.host.state == "failed":
            self.host.restart()
        if self.host.state == "ready":
            chat = ChatOptions(thinking=self.setup.thinking, continue_last=turn.continues)
            leaf = turn.answer.id if turn.continues else turn.answer.parent
            messages = self.book.conversation.for_model(leaf)
            adapter = self.setup.adapter
            turn.sent(self.host.client.submit(messages, self.params, chat=chat, adapter=adapter))
            self._show(turn.status())
        else:
            self.show_status()

    # While it comes, and at its end

    async def drain(self) -> None:
        """Show what has come since the last call."""
        async with self._drawing:
            turn = self.turn
            if turn is None:
                return
            new = turn.drain()
            if new.thinking:
                turn.widget.think()
            if new.text:
                await turn.widget.add(new.text)
            if self.turn is not turn:
                return
            if turn.ended:
                await self._end(turn)
            elif turn.tokens:
                self.book.keep_growing(turn.answer)

    def show_status(self) -> None:
        """The numbers of the turn in hand, or what the engine does without one."""
        if self.turn is not None and self.turn.stream is not None:
            self._show(self.turn.status())
        elif self.host.state == "ready":
            self._show(replace(self.status_line.status, state="ready", detail=""))
        else:
            waiting = self.turn is not None and self.host.state == "loading" and not self.host.detail
            detail = "Enter tries again" if self.host.state == "failed" else self.host.detail
            self._show(Status("waiting", "for the model") if waiting else Status(self.host.state, detail))

    async def stop(self) -> None:
        """Keep what has come; where nothing has, it is as if the prompt had not been sent."""
        turn = self.turn
        if turn is not None and turn.came and turn.stream is not None:
            turn.stopping = True
            turn.stream.abort()
            self._show(turn.status())
        else:
            await self.abandon()

    async def abandon(self) -> None:
        """Stop without waiting for the engine."""
        turn = self.leave()
        if turn is None:
            return
        async with self._drawing:
            if turn.came:
                await turn.widget.finish()
            else:
                await self._take_back(turn)
        self.show_status()

    def leave(self) -> Turn | None:
        """End the turn in hand, and leave the screen as it is; what has come is kept, and its prompt."""
        turn, self.turn = self.turn, None
        if turn is not None and turn.stream is not None:
            turn.stream.close()
        if turn is not None and turn.came:
            if not turn.ended:
                turn.answer.ending = "abort"
            self.book.keep(turn.answer)
        return turn

    async def _end(self, turn: Turn) -> None:
        if turn.error is not None:
            self.turn = None
            await self._fail(turn, turn.error)
            return
        self.book.keep(turn.answer)
        await turn.widget.finish()
        if self.turn is turn:
            self.turn = None
            self._show(turn.status())

    async def _fail(self, turn: Turn, error: FerrumError) -> None:
        """Keep what has come; where nothing has, the prompt stays, unanswered, and is given back."""
        self._told = error
        if turn.came:
            self.book.keep(turn.answer)
            await turn.widget.finish()
        elif turn.asked is None:
            await self._take_back(turn)
        else:
            self._stand_at(turn.asked.id)
            self.book.drop(turn.answer)
            if not self.book.conversation.has_below(turn.asked.id):
                self.post_message(self.Returned(turn.asked.text))
            await self._show_to(self.leaf)
        await self.transcript.add(Failure(error, self.host.way_back))
        self.show_status()

    def _stand_at(self, leaf: int | None, *messages: Message) -> None:
        """Go on from there, where a resume will, too; messages are kept with it."""
        self.leaf = leaf
        if self._first:
            self.book.stand_at(leaf, *messages)
        elif messages:
            self.book.keep(*messages)

    async def _take_back(self, turn: Turn) -> None:
        self._stand_at(turn.back_to)
        if turn.added:
            self.book.drop(turn.answer)
        else:
            await turn.widget.finish()
        if turn.asked is not None and not self.book.conversation.has_below(turn.asked.id):
            self.book.drop(turn.asked)
            self.post_message(self.Returned(turn.asked.text))
        await self._show_to(self.leaf)

    # The engine

    async def engine_ready(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            await self.note(note)
        self._show(Status("ready"))
        self._submit()

    async def engine_gone(self, error: FerrumError, *, started: bool) -> None:
        """It died, or could not be started: the turn in hand fails, unless it may wait for the next one."""
        if started:
            await self.drain()
            if error is not self._told:
                await self.transcript.add(Failure(error))
        elif self.turn is None:
            await self.transcript.add(Failure(error, self.host.way_back))
        else:
            turn, self.turn = self.turn, None
            await self._fail(turn, error)
        self.show_status()

    async def note(self, what: str) -> None:
        await self.transcript.add(Remark(f"note: {what}"))

    def _show(self, status: Status) -> None:
        self.status_line.status = status

    # The tree

    def _answer_of(self, message_id: int | None) -> Message | None:
        if message_id is not None:
            return self.book.conversation.messages[message_id]
        return next((message for message in self.path[::-1] if message.role == "assistant"), None)

    def _prompt_of(self, answer_id: int | None) -> Message | None:
        if answer_id is None:
            return next((message for message in self.path[::-1] if message.role == "user"), None)
        parent = self.book.conversation.messages[answer_id].parent
        return None if parent is None else self.book.conversation.messages[parent]

    async def _show_to(self, leaf: int | None) -> None:
        await self.transcript.show(self.book.conversation.path(leaf), self._place)

    def _place(self, message: Message) -> tuple[int, int]:
        """Which of how many branches a message is, from 1."""
        siblings = [sibling.id for sibling in self.book.conversation.siblings(message.id)]
        return siblings.index(message.id) + 1, len(siblings)
