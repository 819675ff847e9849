"""The turns of a chat without a screen: asking, answering again, going on, and what is kept of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

import click

from ferrum_mlx.catalog import default_card
from ferrum_mlx.chat.attachments import attach
from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.conversation import Conversation, Ending, Message
from ferrum_mlx.chat.other_model import for_model
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.cli.narrate import Thoughts, introduce, say, summarize
from ferrum_mlx.client import EngineClient
from ferrum_mlx.errors import ContextLengthError, FerrumError, UsageError
from ferrum_mlx.messages import ChatOptions, Delta, Failed, Finished
from ferrum_mlx.sanitize import sanitize
from ferrum_mlx.stream import RequestStream

_ENDINGS: tuple[Ending, ...] = ("stop", "length", "abort")


class LinearTalk:
    """One conversation at a time with one engine at a time, which is closed at the end of its `with` block.

    Attributes:
        book: the conversation; its leaf is where the talk stands.
        system: system message of new conversations.
        adapter: the LoRA adapter that answers; "" is none.
    """

    def __init__(
        self,
        client: EngineClient,
        book: Book,
        sampling: SamplingChoice,
        system: str,
        thinking: bool | None,
        adapter: str = "",
    ) -> None:
        self.client, self.book, self.adapter = client, book, adapter
        self.sampling, self.system, self.thinking = sampling, system, thinking

    @property
    def conversation(self) -> Conversation:
        return self.book.conversation

    @property
    def path(self) -> list[Message]:
        return self.conversation.path(self.conversation.leaf)

    @property
    def model(self) -> str:
        """Its name for people: of a file or a repository, what tells it apart."""
        ready = self.client.ready
        return Path(ready.info.model_id if ready else self.client.config.model).name or default_card().alias

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def open(self, conversation: Conversation) -> None:
        """Go on with another conversation."""
        self.book.conversation = conversation

    def new(self) -> None:
        """Begin a new conversation."""
        self.open(Conversation(system=self.system))
        say("a new conversation")

    def recall(self) -> None:
        """Say which conversation this is, and its last messages."""
        number = "" if self.conversation.id is None else f"{self.conversation.id} "
        say(f"session {number}{self.conversation.title!r}, {len(self.path)} messages; the last of them:")
        for message in self.path[-2:]:
            say(f"{'you' if message.role == 'user' else message.model or 'answer'}: {message.text}")
        if self.path and self.path[-1].role == "user":
            say("this prompt has no answer yet: /regen answers it, another one goes beside it")

    def ask(self, text: str, *, beside: Message | None = None) -> None:
        """Answer a prompt behind the last message, or in place of the prompt `beside`.

        Where nobody can answer an offer, a conversation that is full gives way to a new one.
        """
        attached = attach(text)
        back = self.conversation.leaf
        below = self.conversation.last_answer(beside.parent if beside else back)
        asked = self.conversation.add("user", text, parent=below)
        if attached.text_for_model != text:
            asked.sent, asked.attached = attached.text_for_model, attached.names
        for name in attached.names:
            say(f"attached {name}")
        try:
            self._answer(asked, back)
        except ContextLengthError:
            if back is None:
                raise
            if sys.stdin.isatty():
                say("the conversation is full: /new begins a new one, /branch and /edit go back in this one")
                raise
            say("the conversation is full: this prompt begins a new one")
            self.new()
            self.ask(text)

    def again(self) -> None:
        """Another answer to the last prompt."""
        self._answer(self.last_prompt(), self.conversation.leaf)

    def go_on(self) -> None:
        """Continue the last answer where it ends."""
        last = self.path[-1] if self.path else None
        if last is None or last.role != "assistant" or not last.text:
            raise UsageError("there is no answer to continue", next_step="ask something, or /regen")
        self._stream(last, ChatOptions(thinking=self.thinking, continue_last=True))

    def last_prompt(self) -> Message:
        """The prompt that the last answer is to, or that has none yet."""
        prompts = [message for message in self.path if message.role == "user"]
        if not prompts:
            raise UsageError("nothing has been asked yet", next_step="type a prompt")
        return prompts[-1]

    def change_model(self, model: str) -> None:
        """An engine with another model in place of this one; where it does not start, this one again."""
        from ferrum_mlx import hub

        old = self.client
        config, behind = for_model(old.config, model)
        self.sampling.params(model)
        if config.backend != "fake":
            hub.resolve(model, offline=config.offline, progress=True, backend=config.backend)
        old.close()  # there may be no room for two
        self.client = EngineClient.in_process(config, on_loading=say, on_note=old.on_note)
        try:
            introduce(self.client.start())
            for line in behind:
                say(line)
            self.adapter = ""
        except FerrumError:
            self.client.close()
            self.client = old
            say("starting the engine as it was")
            old.restart()
            raise

    def _answer(self, asked: Message, back: int | None) -> None:
        """A new answer to a prompt; where nothing comes, the talk stands at `back` again, without it.

        Raises:
            FerrumError: the request failed; what came before stands on stdout, and is kept.
        """
        answer = self.conversation.add("assistant", parent=asked.id)
        answer.model = self.model
        self.book.stand_at(answer.id, asked, answer)
        try:
            self._stream(answer, ChatOptions(thinking=self.thinking))
        finally:
            if answer.came_to_nothing:
                self.book.stand_at(back)
                self.book.drop(answer)
                if asked.id != back and not self._has_answers(asked):
                    self.book.drop(asked)

    def _has_answers(self, asked: Message) -> bool:
        return any(message.parent == asked.id for message in self.conversation.messages.values())

    def _stream(self, answer: Message, chat: ChatOptions) -> None:
        """Print what comes, and put it behind the answer's text."""
        leaf = answer.id if chat.continue_last else answer.parent
        params = self.sampling.params(self.client.config.model)
        messages = self.conversation.for_model(leaf)
        stream = self.client.submit(messages, params, chat=chat, adapter=self.adapter)
        thoughts, came = Thoughts(), len(answer.text)
        try:
            while not stream.ended:
                try:
                    self._take(stream, answer, thoughts)
                except KeyboardInterrupt:
                    if not sys.stdin.isatty():
                        raise
                    stream.abort()
        except FerrumError:
            answer.ending = "broken"
            if len(answer.text) > came:
                click.echo()
            raise
        finally:
            thoughts.end()
            self.book.keep(answer)

    def _take(self, stream: RequestStream, answer: Message, thoughts: Thoughts) -> None:
        for event in stream:
            match event:
                case Delta(_, text, _, thinking):
                    answer.thinking += thinking
                    thoughts.show(thinking)
                    if not answer.text:
                        answer.thought_s = thoughts.seconds()
                    if text:
                        thoughts.end()
                        answer.text += text  # as it came, for the model; safe wherever it is shown
                        click.echo(sanitize(text), nl=False)
                    self.book.keep_growing(answer)
                case Finished():
                    thoughts.end()
                    click.echo()
                    answer.usage, answer.timings = event.usage, event.timings
                    answer.ending = next(end for end in _ENDINGS if end == event.finish_reason)
                    summarize(event)
                case Failed(_, error):
                    raise error
