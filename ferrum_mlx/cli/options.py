"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import click

from ferrum_mlx.chat.sampling_choice import MAX_TOKENS, SamplingChoice
from ferrum_mlx.config import BACKENDS, BASE, DRAFT_TOKENS, KV_BITS, NUMERICS, EngineConfig, check_adapter
from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.sampling import SamplingParams

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", 1)}
_UNITS |= {prefix: 1000**power for power, prefix in enumerate("KMGTP", 1)}


def byte_size(text: str) -> int:
    """Bytes in a size such as 512MB, 1.5GB or 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise click.BadParameter(
            f"{shown(text)} is no size; allowed: a number with a unit, such as 512MB, 2GB or 2GiB"
        )
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def named_folder(text: str) -> tuple[str, str]:
    """Name and folder of an adapter, out of NAME=FOLDER."""
    name, sign, folder = text.partition("=")
    if not sign:
        raise click.BadParameter(f"{shown(text)}; allowed: NAME=FOLDER, such as poet=./adapters/poet")
    return name, folder


Command = Callable[..., None]

_ENGINE = (
    click.option("-m", "--model", default="", help="Alias, hub repository, folder or .gguf file."),
    click.option(
        "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="Array library."
    ),
    click.option(
        "--numerics", type=click.Choice(NUMERICS), default="fast", show_default=True, help="Matmul route."
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "gpu"]), default=None, help="Default: the backend's choice."
    ),
    click.option(
        "--kv-memory",
        type=byte_size,
        metavar="SIZE",
        default=None,
        help="Memory for KV blocks, such as 512MB or 2GB.",
    ),
    click.option(
        "--kv-bits",
        type=click.Choice([str(bits) for bits in KV_BITS]),
        default=None,
        help="Bits a number in KV blocks; 4 on mlx alone. Default: the model's own dtype.",
    ),
    click.option(
        "--max-model-len",
        type=int,
        default=None,
        help="Longest prompt + answer, in tokens; default: the model's, at most 4096.",
    ),
    click.option(
        "--events", metavar="FILE", default="", help="Append a JSON line a step and a request's transition."
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=True,
        show_default=True,
        help="Keep past tokens' KV for prompts that begin alike.",
    ),
    click.option(
        "--prefill-while-decoding",
        type=int,
        metavar="TOKENS",
        default=None,
        help="Prompt tokens a step while an answer runs; default: by device.",
    ),
    click.option(
        "--speculative",
        metavar="off|ngram|self|draft:MODEL",
        default="off",
        show_default=True,
        help="Who guesses tokens ahead; answers stay the same.",
    ),
    click.option(
        "--draft-tokens",
        type=int,
        metavar="N",
        default=None,
        help=f"Most guesses a step; default: {DRAFT_TOKENS}, fewer where they do not pay.",
    ),
    click.option(
        "--adapter",
        type=named_folder,
        multiple=True,
        metavar="NAME=FOLDER",
        help="A LoRA adapter to load; may be repeated.",
    ),
    click.option("--offline", is_flag=True, help="Never touch the network."),
)
_SAMPLING = (
    click.option(
        "--max-tokens",
        type=int,
        default=None,
        help=f"Most tokens of an answer; default: {MAX_TOKENS}.",
    ),
    click.option("--temperature", type=float, default=None, help="0 takes the likeliest token."),
    click.option("--top-p", type=float, default=None, help="Share of probability kept; 1 keeps all."),
    click.option("--top-k", type=int, default=None, help="Tokens kept; 0 keeps all."),
    click.option("--min-p", type=float, default=None, help="Least share of the likeliest's probability."),
    click.option(
        "--xtc-probability",
        type=float,
        default=None,
        help="How often XTC drops likely ones; needs a temperature.",
    ),
    click.option("--xtc-threshold", type=float, default=None, help="Likely for XTC: above this."),
    click.option(
        "--repetition-penalty", type=float, default=None, help="On tokens of prompt or answer; 1 is off."
    ),
    click.option("--presence-penalty", type=float, default=None, help="On tokens of the answer; 0 is off."),
    click.option("--frequency-penalty", type=float, default=None, help="On each of their uses; 0 is off."),
    click.option("--min-tokens", type=int, default=None, help="Least tokens of an answer."),
    click.option("--seed", type=int, default=None, help="Same seed, same answer; default: a fresh one."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated."),
)


def engine_options(command: Command) -> Command:
    """Add the options that make an EngineConfig; see `engine_config`."""
    for option in reversed(_ENGINE):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """Add the options that make SamplingParams; see `sampling_params`."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def use_adapter_option(command: Command) -> Command:
    """Add --use-adapter NAME; see `chosen_adapter`."""
    option = click.option(
        "--use-adapter",
        metavar="NAME",
        default=None,
        help=f"Which adapter answers; {BASE}: the model itself. Default: the only one loaded.",
    )
    return option(command)


def chosen_adapter(config: EngineConfig, name: str | None, *, required: bool = True) -> str:
    """The adapter that answers; "" is the model itself.

    Args:
        required: of several, one must be chosen.

    Raises:
        UsageError: none of that name is loaded, or none is chosen.
    """
    loaded = config.adapter_names
    if name is not None:
        return "" if name == BASE else check_adapter(name, loaded)
    if len(loaded) > 1 and not required:
        return ""
    if len(loaded) > 1:
        raise UsageError(
            f"{len(loaded)} adapters are loaded, and none is chosen",
            f"allowed: {', '.join(loaded)}, {BASE}",
            "add --use-adapter NAME",
        )
    return "".join(loaded)


def thinking_option(command: Command) -> Command:
    """Add --thinking/--no-thinking: True, False, or None if neither is given."""
    option = click.option(
        "--thinking/--no-thinking", default=None, help="Switch of some reasoning models; others ignore it."
    )
    return option(command)


def engine_config(options: dict[str, Any], model: str = "") -> EngineConfig:
    """Take the engine's options out of a command's; `model` is its MODEL argument, if it has one."""
    named = options.pop("model")
    if model and named and model != named:
        raise UsageError(f"two models are named, {shown(model)} and {shown(named)}", "allowed: one")
    return EngineConfig(
        model=model or named,
        backend=options.pop("backend"),
        numerics=options.pop("numerics"),
        device=options.pop("device") or "",
        kv_memory=options.pop("kv_memory"),
        kv_bits=None if (bits := options.pop("kv_bits")) is None else int(bits),
        max_model_len=options.pop("max_model_len"),
        events=options.pop("events"),
        prefix_cache=options.pop("prefix_cache"),
        prefill_while_decoding=options.pop("prefill_while_decoding"),
        speculative=options.pop("speculative"),
        draft_tokens=options.pop("draft_tokens"),
        adapters=options.pop("adapter"),
        offline=options.pop("offline"),
    )


def sampling_given(options: dict[str, Any]) -> dict[str, object]:
    """Take the sampling options out of a command's; those that were not given are left out."""
    names = {field.name for field in dataclasses.fields(SamplingParams)} & options.keys()
    given = {name: options.pop(name) for name in names}
    return {name: value for name, value in given.items() if value not in (None, ())}


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take the sampling options out of a command's; what is not given is the default, which is greedy."""
    return SamplingChoice(sampling_given(options), suggest=False).params("")
