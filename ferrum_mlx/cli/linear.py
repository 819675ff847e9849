"""Chat without a screen: one prompt a line from stdin, answers on stdout, the rest on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from ferrum_mlx.cli.narrate import Thoughts, introduce, say, say_note, summarize
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError
from ferrum_mlx.messages import ChatMessage, ChatOptions, Delta, Failed, Finished
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.sanitize import sanitize
from ferrum_mlx.stream import RequestStream

_HELP = "/new starts a new conversation, /quit ends; Ctrl+C stops an answer. Anything else is a prompt."


def talk(config: EngineConfig, params: SamplingParams, system: str = "", thinking: bool | None = None) -> int:
    """Converse until the input ends; returns the exit code, that of the last error if there was one."""
    code = 0
    opening: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    history = opening.copy()
    chat = ChatOptions(thinking=thinking)
    with EngineClient.in_process(config, on_loading=say, on_note=say_note) as client:
        introduce(client.start())
        for line in _lines():
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/help":
                    say(_HELP)
                case "/new":
                    history = opening.copy()
                    say("a new conversation")
                case prompt:
                    asked: ChatMessage = {"role": "user", "content": prompt}
                    try:
                        answer = _print_answer(client.submit([*history, asked], params, chat=chat))
                    except FerrumError as error:
                        code = error.exit_code
                        say(f"ferrum-mlx: {error}")
                        if isinstance(error, EngineDiedError):
                            say("starting a new engine")
                            client.restart()
                    else:
                        history += [asked, {"role": "assistant", "content": answer}]
    return code


def _lines() -> Iterator[str]:
    interactive = sys.stdin.isatty()
    if interactive:
        say(_HELP)
    while True:
        if interactive:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def _print_answer(stream: RequestStream) -> str:
    """Print an answer as it comes; returns it whole, without what was thought before it.

    Raises:
        FerrumError: the request failed; what came before stands on stdout.
    """
    parts: list[str] = []
    thoughts = Thoughts()
    while not stream.ended:
        try:
            _print_events(stream, parts, thoughts)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            stream.abort()
    return "".join(parts)


def _print_events(stream: RequestStream, parts: list[str], thoughts: Thoughts) -> None:
    for event in stream:
        match event:
            case Delta(_, text, _, thinking):
                thoughts.show(thinking)
                if text:
                    thoughts.end()
                    parts.append(text)
                    click.echo(sanitize(text), nl=False)
            case Finished():
                thoughts.end()
                click.echo()
                summarize(event)
            case Failed(_, error):
                thoughts.end()
                if parts:
                    click.echo()
                raise error
