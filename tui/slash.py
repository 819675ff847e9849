"""What the commands of the prompt do on the screen. Those of a screen of their own wait for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ferrum_mlx.chat import commands, export
from ferrum_mlx.chat.attachments import attach
from ferrum_mlx.chat.commands import Call
from ferrum_mlx.chat.sampling_choice import assignments, described
from ferrum_mlx.errors import UsageError

from . import dialogs
from .clipboard import copy
from .dialogs import kept, use_model, use_setup, use_system, with_model
from .markup import code_of
from .sharing import compare_models
from .talk import Setup

if TYPE_CHECKING:
    from .app import ChatApp


async def obey(app: ChatApp, call: Call) -> None:
    """Do what a command says.

    Raises:
        FerrumError: it cannot be done.
    """
    argument = call.argument
    match call.name:
        case "new" | "help" | "engine" | "quit":
            await app.run_action({"new": "new_chat"}.get(call.name, call.name))
        case "regen":
            await app.action_regenerate()
        case "continue":
            for talk in app.desk.talks:
                await app.desk.go_on(talk)
        case "edit":
            await _edit(app, argument)
        case "branch":
            talk = app.desk.talk
            await app.desk.go_to(talk, commands.walk(talk.book.conversation, talk.leaf, argument))
        case "copy":
            await _copy(app, argument)
        case "model":
            use = partial(use_model, app)
            await (with_model(app, argument, use) if argument else app.run_action("models"))
        case "compare":
            await _compare(app, argument)
        case "set":
            await _set(app, argument)
        case "system":
            await _system(app, argument)
        case "think":
            use_setup(app, replace(app.desk.talk.setup, thinking=commands.thinking(argument)))
        case "adapter":
            _adapter(app, argument)
        case "theme":
            _theme(app, argument)
        case _:
            await _session(app, call)


async def _session(app: ChatApp, call: Call) -> None:
    """The commands on kept conversations."""
    conversation, argument = app.desk.talk.book.conversation, call.argument
    match call.name:
        case "sessions":
            app.ask_for(dialogs.pick_session(app, argument))
        case "resume":
            number = commands.session_id(argument) if argument else kept(app).latest(conversation.id)
            if number is None:
                raise UsageError("there is no other session to go on with")
            await app.open(kept(app).load(number))
        case "rename":
            app.desk.talk.book.rename(argument)
            app.show_setup()
        case "delete":
            store = kept(app)  # or the chat stays as it is
            number = commands.session_id(argument) if argument else conversation.id
            if number is None:
                raise UsageError("this conversation is not kept yet")
            if number == conversation.id:
                await app.action_new_chat()
            store.delete(number)
            app.tell(f"Session {number} is deleted.")
        case "export":
            file = export.write(conversation, app.desk.talk.leaf, commands.whole(argument))
            app.tell(f"Written to {file}.")


async def _edit(app: ChatApp, text: str) -> None:
    asked = [message for message in app.desk.talk.path if message.role == "user"]
    if not asked:
        raise UsageError("there is no prompt to edit yet")
    if not text:
        app.desk.edit(app.desk.talk, asked[-1])
        return
    app.desk.require_idle()
    attached = attach(text)  # what may fail comes before the prompt is one to be edited
    app.desk.edit(app.desk.talk, asked[-1])
    await app.desk.ask(text, attached)


async def _compare(app: ChatApp, argument: str) -> None:
    words = commands.words(argument)
    setup = app.desk.talk.setup
    if words:
        app.desk.require_idle()
    if not words:
        await app.end_comparison()
    elif len(words) == 1 and "=" not in words[0]:
        await with_model(app, words[0], partial(compare_models, app))
    else:
        changes = assignments(words)
        other = _changed(app, changes)
        await app.end_comparison()
        here, there = (
            described({name: getattr(each.choice.params(app.host.config.model), name) for name in changes})
            for each in (setup, other)
        )
        await app.desk.compare(app.host, other, here, there)


async def _set(app: ChatApp, argument: str) -> None:
    if argument:
        use_setup(app, _changed(app, assignments(commands.words(argument))))
    else:
        await app.run_action("settings")


def _changed(app: ChatApp, changes: Mapping[str, object]) -> Setup:
    """The settings in use with these changes, checked."""
    setup = app.desk.talk.setup
    setup = replace(setup, choice=setup.choice.with_given(changes))
    setup.choice.params(app.host.config.model)
    return setup


async def _system(app: ChatApp, text: str) -> None:
    if text:
        use_system(app, commands.system(text))
    else:
        await app.run_action("settings")


async def _copy(app: ChatApp, what: str) -> None:
    said = (message.text for message in app.desk.talk.path[::-1] if message.role == "assistant")
    text = next(filter(None, said), "")
    if what == "code":
        text = next(reversed(code_of(text)), "")
    app.tell(await copy(app, text) if text else "There is nothing to copy yet.")


def _adapter(app: ChatApp, name: str) -> None:
    setup, loaded = app.desk.talk.setup, app.host.config.adapter_names
    if name:
        use_setup(app, replace(setup, adapter=commands.adapter(name, loaded)))
    else:
        app.tell(commands.adapters(setup.adapter, loaded))


def _theme(app: ChatApp, name: str) -> None:
    if not name:
        app.search_themes()
    elif name in app.available_themes:
        app.theme = name
    else:
        raise UsageError(f"there is no theme {name}", f"allowed: {', '.join(sorted(app.available_themes))}")
