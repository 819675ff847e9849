"""`ferrum-mlx chat`: the terminal UI, or one prompt a line where there is no terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from ferrum_mlx.chat import settings as user_settings
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.chat.store import Store
from ferrum_mlx.cli.narrate import say_note
from ferrum_mlx.cli.options import (
    chosen_adapter,
    engine_config,
    engine_options,
    sampling_given,
    sampling_options,
    thinking_option,
    use_adapter_option,
)
from ferrum_mlx.cli.screen import has_screen, prepare_chat, pull_if_missing
from ferrum_mlx.errors import FerrumError


@click.command(short_help="Talk to a model in the terminal.")
@click.argument("model_argument", required=False, default="", metavar="[MODEL]")
@engine_options
@sampling_options
@thinking_option
@use_adapter_option
@click.option("--system", default=None, help="System message of every conversation.")
@click.option("--plain", is_flag=True, help="One prompt a line, no screen; so it is on a pipe, too.")
@click.option(
    "--resume",
    type=int,
    is_flag=False,
    flag_value=0,
    default=None,
    metavar="[ID]",
    help="Go on with a session; without its number, the last one.",
)
def chat(
    model_argument: str,
    thinking: bool | None,
    use_adapter: str | None,
    system: str | None,
    plain: bool,
    resume: int | None,
    **options: Any,
) -> None:
    """Talk to MODEL, or to the default model.

    Options go before the settings file, and that before what the model's makers suggest. A model that is
    not on this machine is downloaded first, where it is the default or named here; on the screen, one that
    the settings file names waits for your word. Prompts out of a pipe get the likeliest answer, the same
    one every time: the settings file is not read then, and nothing is kept, unless --resume is given.
    """
    config = engine_config(options, model_argument)
    adapter = chosen_adapter(config, use_adapter, required=False)
    piped = not sys.stdin.isatty()
    settings, notes = (user_settings.Settings(), []) if piped else user_settings.load()
    named = bool(config.model)
    config = config if named else replace(config, model=settings.model)
    sampling = SamplingChoice(
        sampling_given(options), settings.sampling, suggest=not piped and config.backend != "fake"
    )
    sampling.params(config.model)  # what is set must go together: said before the model is fetched
    thinking = settings.thinking if thinking is None else thinking
    system = settings.system if system is None else system
    if plain or not has_screen(sys.stdin, sys.stdout, sys.stderr):
        from ferrum_mlx.cli.linear import talk

        pull_if_missing(config)
        for note in notes:
            say_note(note)
        code = talk(config, sampling, system, thinking, resume, keep=not piped, adapter=adapter)
        click.get_current_context().exit(code)
    from ferrum_tui.escape import notice_escape, when_suspected

    notes += prepare_chat(config, named=named)
    notice_escape()
    from ferrum_tui.app import ChatApp
    from ferrum_tui.terminal import follow_terminal

    follow_terminal()
    store, conversation = _open_store(resume, notes)
    app = ChatApp(
        config,
        sampling,
        system,
        thinking=thinking,
        adapter=adapter,
        store=store,
        settings=settings,
        conversation=conversation,
        notes=notes,
    )
    when_suspected(app.desk.hold)
    app.run()
    click.get_current_context().exit(app.return_code or 0)


def _open_store(resume: int | None, notes: list[str]) -> tuple[Store | None, Conversation | None]:
    """Where conversations are kept, and the one to go on with; what a user must know goes to `notes`.

    Raises:
        FerrumError: a session is asked for that is not there, or none can be read.
    """
    try:
        store = Store(on_note=notes.append)
    except FerrumError as error:
        if resume is not None:
            raise
        notes.append(f"conversations are not kept: {error}")
        return None, None
    if resume is None:
        return store, None
    session = resume or store.latest()
    if session is None:
        notes.append("there is no session to go on with; this is the first")
        return store, None
    return store, store.load(session)
