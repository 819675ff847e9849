"""`ferrum-mlx chat`: the terminal UI, or one prompt a line where there is no terminal."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ferrum_mlx.cli.options import (
    engine_config,
    engine_options,
    sampling_options,
    sampling_params,
    thinking_option,
)
from ferrum_mlx.config import EngineConfig


@click.command(short_help="Talk to a model in the terminal.")
@click.argument("model_argument", required=False, default="", metavar="[MODEL]")
@engine_options
@sampling_options
@thinking_option
@click.option("--system", default="", help="System message of every conversation.")
@click.option("--plain", is_flag=True, help="One prompt a line, no screen; so it is on a pipe, too.")
def chat(model_argument: str, thinking: bool | None, system: str, plain: bool, **options: Any) -> None:
    """Talk to MODEL, or to the default model.

    Sampling is as the model's makers suggest unless options say otherwise; prompts out of a pipe get the
    likeliest answer, the same one every time.
    """
    config = engine_config(options, model_argument)
    piped = not sys.stdin.isatty()
    params = sampling_params(options, None if piped else _suggested(config))
    _pull_if_missing(config)
    if plain or not _has_screen():
        from ferrum_mlx.cli.linear import talk

        click.get_current_context().exit(talk(config, params, system, thinking))
    from ferrum_tui.app import ChatApp

    app = ChatApp(config, params, system, thinking=thinking)
    app.run()
    click.get_current_context().exit(app.return_code or 0)


def _has_screen() -> bool:
    streams = (sys.stdin, sys.stdout, sys.stderr)  # the screen is drawn on stderr
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def _suggested(config: EngineConfig) -> dict[str, float]:
    from ferrum_mlx.catalog import find_card

    card = None if config.backend == "fake" else find_card(config.model)
    return card.sampling if card else {}


def _pull_if_missing(config: EngineConfig) -> None:
    """Download here, where progress can be shown: the engine's process has no terminal."""
    if config.backend != "fake":
        from ferrum_mlx import hub

        hub.resolve(config.model, offline=config.offline, progress=True)
