"""The slash commands of a chat without a screen."""

from __future__ import annotations

import time
from collections.abc import Callable

from ferrum_mlx.catalog import cards
from ferrum_mlx.chat import commands
from ferrum_mlx.chat.commands import COMMANDS, Call
from ferrum_mlx.chat.export import write
from ferrum_mlx.chat.sampling_choice import NAMES, assignments, described
from ferrum_mlx.chat.store import Store
from ferrum_mlx.cli.linear_talk import LinearTalk
from ferrum_mlx.cli.narrate import say
from ferrum_mlx.errors import UsageError


def run(talk: LinearTalk, call: Call) -> bool:
    """Do what a command says; False ends the chat.

    Raises:
        FerrumError: it cannot be done.
    """
    if call.name == "quit":
        return False
    if call.command.screen:
        raise UsageError(
            f"/{call.name} needs the screen", next_step="run chat on a terminal, without --plain"
        )
    _ACTIONS[call.name](talk, call.argument)
    return True


def _help(talk: LinearTalk, argument: str) -> None:
    usages = {f"/{c.name} {c.arguments}".rstrip(): c.help for c in COMMANDS if not c.screen}
    width = max(map(len, usages))
    for usage, what in usages.items():
        say(f"{usage:{width}}  {what}")
    say("Anything else is a prompt; @FILE in it sends a text file along, // begins one with a slash.")


def _new(talk: LinearTalk, argument: str) -> None:
    talk.new()


def _regen(talk: LinearTalk, argument: str) -> None:
    talk.again()


def _continue(talk: LinearTalk, argument: str) -> None:
    talk.go_on()


def _edit(talk: LinearTalk, argument: str) -> None:
    prompt = talk.last_prompt()
    if not argument:
        raise UsageError("/edit needs the new text here", next_step=f"the prompt is {prompt.text!r}")
    talk.ask(argument, beside=prompt)


def _branch(talk: LinearTalk, argument: str) -> None:
    talk.book.stand_at(commands.walk(talk.conversation, talk.conversation.leaf, argument))
    talk.recall()


def _model(talk: LinearTalk, argument: str) -> None:
    if argument:
        talk.change_model(argument)
    else:
        say(f"the model is {talk.model}; the catalogue has {', '.join(cards())}")


def _adapter(talk: LinearTalk, argument: str) -> None:
    loaded = talk.client.config.adapter_names
    if argument:
        talk.adapter = commands.adapter(argument, loaded)
    say(commands.adapters(talk.adapter, loaded))


def _set(talk: LinearTalk, argument: str) -> None:
    if argument:
        choice = talk.sampling.with_given(assignments(commands.words(argument)))
        choice.params(talk.client.config.model)
        talk.sampling = choice
    params = talk.sampling.params(talk.client.config.model)
    say(described({name: getattr(params, name) for name in NAMES}))


def _system(talk: LinearTalk, argument: str) -> None:
    if argument:
        talk.system = commands.system(argument)
        talk.book.set_system(talk.system)
    say(f"system message: {talk.conversation.system or 'none'}")


def _think(talk: LinearTalk, argument: str) -> None:
    talk.thinking = commands.thinking(argument)
    say(f"thinking: {argument.lower()}")


def _sessions(talk: LinearTalk, argument: str) -> None:
    rows = _store(talk).list(argument)
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.updated))
        said = f": {row.snippet}" if row.snippet else ""
        say(f"{row.id}  {when}  {row.messages} messages  {row.model}  {row.title}{said}")
    if not rows:
        say("no session has these words" if argument else "no sessions yet")


def _resume(talk: LinearTalk, argument: str) -> None:
    store = _store(talk)
    wanted = commands.session_id(argument) if argument else store.latest(talk.conversation.id)
    if wanted is None:
        raise UsageError("there is no other session to go on with")
    talk.open(store.load(wanted))
    talk.recall()


def _rename(talk: LinearTalk, argument: str) -> None:
    talk.book.rename(argument)
    say(f"the title is {argument!r}")


def _delete(talk: LinearTalk, argument: str) -> None:
    store = _store(talk)
    current = talk.conversation.id
    session = commands.session_id(argument) if argument else current
    if session is None:
        raise UsageError("this conversation is not kept yet", next_step="/delete ID, see /sessions")
    store.delete(session)
    say(f"session {session} is deleted")
    if session == current:
        talk.new()


def _export(talk: LinearTalk, argument: str) -> None:
    say(f"written to {write(talk.conversation, talk.conversation.leaf, commands.whole(argument))}")


def _engine(talk: LinearTalk, argument: str) -> None:
    totals = talk.client.totals()
    ended = sum(totals.ended.values())
    said = f"{ended} requests ended, {totals.generated_tokens} tokens made, {totals.cached_tokens} cached"
    if (step := totals.last_step) is not None:
        kv = step.kv
        said += f"; KV blocks: {kv.used_blocks} of {kv.total_blocks} in use, {kv.cached_blocks} more cached"
    say(said)


def _store(talk: LinearTalk) -> Store:
    if talk.book.store is None:
        raise UsageError("this chat keeps no sessions", next_step="on a pipe, --resume does")
    return talk.book.store


_ACTIONS: dict[str, Callable[[LinearTalk, str], None]] = {
    "new": _new,
    "regen": _regen,
    "continue": _continue,
    "edit": _edit,
    "branch": _branch,
    "model": _model,
    "adapter": _adapter,
    "set": _set,
    "system": _system,
    "think": _think,
    "sessions": _sessions,
    "resume": _resume,
    "rename": _rename,
    "delete": _delete,
    "export": _export,
    "engine": _engine,
    "help": _help,
}
