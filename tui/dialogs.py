"""The screens that end in an answer, and what is done with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ferrum_mlx.catalog import default_card, find_card
from ferrum_mlx.chat.store import Store
from ferrum_mlx.errors import FerrumError, UsageError

from .screens import settings
from .screens.listing import memory_fit
from .screens.models import ModelPicker
from .screens.sessions import SessionsScreen
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
    config = app.host.config
    current = config.model or default_card().alias
    fit = partial(memory_fit, kv_bits=config.kv_bits)
    name = await app.push_screen_wait(ModelPicker(current, config.offline, fit))
    if name is not None:
        await use_model(app, name)


async def use_model(app: ChatApp, model: str) -> None:
    """Go on with another model, in an engine of its own; the one before it ends."""
    await app.end_comparison()
    await app.desk.talk.abandon()
    config = app.host.config
    before, app.host = app.host, app.new_host(replace(config, model=model, adapters=()))
    app.desk.talk.host = app.host
    if config.adapters:
        app.tell("The adapters are those of the model before, and stay behind.")
    app.desk.talk.setup = replace(app.desk.talk.setup, adapter="")
    app.feed.attach(app.host.client)
    app.show_setup()
    await before.close()
    app.host.start()


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
