"""The screens that end in an answer, and what is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ferrum_mlx import hub
from ferrum_mlx.catalog import find_card
from ferrum_mlx.chat.other_model import for_model
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError, ModelNotFoundError, UsageError
from ferrum_mlx.fit import backend_here
from ferrum_mlx.loadable import check_loadable

from .host import name_of
from .screens import settings
from .screens.listing import for_engine
from .screens.models import ModelPicker
from .screens.sessions import SessionsScreen
from .sharing import replace_engine
from .talk import Setup

if TYPE_CHECKING:
    from .app import ChatApp


def kept(app: ChatApp) -> Store:
    """Where conversations are kept.

    Raises:
        UsageError: they are not.
    """
    if app.store is None:
        raise UsageError("conversations are not kept in this chat", next_step="a note in the chat says why")
    return app.store


async def pick_model(app: ChatApp) -> None:
    await _pick(app, partial(use_model, app))


async def with_model(app: ChatApp, model: str, then: Callable[[str], Awaitable[None]]) -> None:
    """Look for a model; what is not on this machine is fetched on the screen, and then used.

    Args:
        then: takes the name of a model that is here, and whose files are sound as far as their headers
            tell. The user may have chosen another one meanwhile.

    Raises:
        FerrumError: no such model, none that may be fetched, or none that can be loaded. Nothing has changed.
    """
    config = app.host.config
    app.desk.talk.setup.choice.params(model)
    if config.backend == "fake":
        await then(model)
        return
    backend = backend_here(config.backend)
    found = await asyncio.to_thread(hub.info, model, backend)
    if found.path is not None:
        await asyncio.to_thread(check_loadable, found.name, backend)
        await then(found.name)
    elif config.offline:
        raise ModelNotFoundError(
            f"{found.name} is not on this machine, and --offline forbids fetching it",
            next_step="Ctrl+O shows which are here",
        )
    else:
        app.ask_for(_pick(app, then, found.name))


async def _pick(app: ChatApp, then: Callable[[str], Awaitable[None]], fetch: str = "") -> None:
    config = app.host.config
    fit, backend = for_engine(config)
    name = await app.push_screen_wait(
        ModelPicker(name_of(config), config.offline, fit, backend=backend, fetch=fetch)
    )
    try:
        if name is not None:
            if config.backend != "fake":
                await asyncio.to_thread(check_loadable, name, backend_here(config.backend))
            await then(name)
    except FerrumError as error:
        app.tell(str(error), bad=True)


async def use_model(app: ChatApp, model: str) -> None:
    """Go on with another model, in an engine of its own; the one before it ends.

    Back from one that did not load, the engine is as it was.
    """
    await app.end_comparison()
    await app.desk.talk.abandon()
    config, before = app.host.config, app.host.before
    config, behind = (
        (before, []) if before is not None and model == name_of(before) else for_model(config, model)
    )
    app.desk.talk.setup = replace(app.desk.talk.setup, adapter="")
    for line in behind:
        await app.desk.talk.note(line)
    await replace_engine(app, replace(config, memory_share=1.0))


async def pick_session(app: ChatApp, words: str = "") -> None:
    try:
        store, current = kept(app), app.desk.talk.book.conversation
        chosen = await app.push_screen_wait(SessionsScreen(store, current, words))
        if chosen is not None and chosen != current.id:
            await app.open(store.load(chosen))
        app.show_setup()  # its title may be another
    except FerrumError as error:
        app.tell(str(error), bad=True)


async def change_settings(app: ChatApp) -> None:
    talk = app.desk.talk
    choice = talk.setup.choice
    card = find_card(app.host.config.model) if choice.suggest else None
    now = settings.Setup(
        sampling={**choice.settings, **choice.given},
        system=talk.book.conversation.system,
        thinking=talk.setup.thinking,
        theme=app.theme,
        panel=app.screen.has_class("-panel"),
    )
    new = await app.push_screen_wait(settings.SettingsScreen(now, card.sampling if card else {}))
    if new is None:
        return
    app.theme = new.theme
    app.show_panel(new.panel)
    choice = replace(choice, given=new.sampling, settings={})
    use_setup(app, replace(talk.setup, choice=choice, thinking=new.thinking))
    if new.system != now.system:
        use_system(app, new.system)


def use_setup(app: ChatApp, setup: Setup) -> None:
    """Other settings for the answers to come."""
    app.desk.talk.setup = setup
    app.show_setup()


def use_system(app: ChatApp, system: str) -> None:
    """Another system message, of this conversation and those after it."""
    app.system = system
    app.desk.talk.book.set_system(system)
    app.show_setup()
