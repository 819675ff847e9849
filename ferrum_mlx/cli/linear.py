"""Chat without a screen: one prompt or command a line from stdin, answers on stdout, the rest on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from ferrum_mlx.chat.book import Book
from ferrum_mlx.chat.commands import as_text, parse
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.chat.store import Store
from ferrum_mlx.cli.linear_commands import run
from ferrum_mlx.cli.linear_talk import LinearTalk
from ferrum_mlx.cli.narrate import introduce, say, say_note
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError, SessionsBusyError

_GREETING = "/help lists the commands, /quit ends; Ctrl+C stops an answer. Anything else is a prompt."


def talk(
    config: EngineConfig,
    sampling: SamplingChoice,
    system: str = "",
    thinking: bool | None = None,
    resume: int | None = None,
    keep: bool = False,
    adapter: str = "",
) -> int:
    """Converse until the input ends; returns the exit code, that of the last error if there was one.

    Args:
        resume: the session to go on with, 0 for the last; None begins a new one.
        adapter: the LoRA adapter that answers; "" is none.
        keep: write the conversation to the user's sessions, also where none is resumed.
    """
    store = _open_store(required=resume is not None) if keep or resume is not None else None
    try:
        conversation = Conversation(system=system)
        if store is not None and resume is not None:
            conversation = _resumed(store, resume, system)
        client = EngineClient.in_process(config, on_loading=say, on_note=say_note)
        book = Book(conversation, store, _not_kept)
        with LinearTalk(client, book, sampling, system, thinking, adapter) as linear:
            introduce(linear.client.start())
            if conversation.messages:
                linear.recall()
            return _converse(linear)
    finally:
        if store is not None:
            store.close()


def _converse(linear: LinearTalk) -> int:
    code = 0
    for line in _lines():
        try:
            call = parse(line)
            if call is None and line.strip():
                linear.ask(as_text(line.strip()))
            elif call is not None and not run(linear, call):
                break
        except FerrumError as error:
            code = error.exit_code
            say(f"ferrum-mlx: {error}")
            if isinstance(error, EngineDiedError):
                say("starting a new engine")
                linear.client.restart()
    return code


def _lines() -> Iterator[str]:
    interactive = sys.stdin.isatty()
    if interactive:
        say(_GREETING)
    while True:
        if interactive:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def _open_store(required: bool) -> Store | None:
    """The user's sessions; where they cannot be used, a chat that asks for none of them goes on without."""
    try:
        return Store(on_note=say_note)
    except FerrumError as error:
        if required:
            raise
        _not_kept(error)
        return None


def _not_kept(error: FerrumError) -> None:
    for_now = " for now" if isinstance(error, SessionsBusyError) else ""
    say_note(f"this conversation is not kept{for_now}: {error}")


def _resumed(store: Store, session: int, system: str) -> Conversation:
    wanted = session or store.latest()
    if wanted is None:
        say_note("there is no session to go on with; this is the first")
        return Conversation(system=system)
    return store.load(wanted)
