"""`ferrum-mlx models`: the catalogue, and what of it lies on this machine."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ferrum_mlx import fit, hub
from ferrum_mlx.cli.narrate import say
from ferrum_mlx.errors import UsageError
from ferrum_mlx.plain import size
from ferrum_mlx.sanitize import sanitize

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_backend = click.option(
    "--backend",
    type=click.Choice(["auto", "mlx", "torch"]),
    default="auto",
    show_default=True,
    callback=lambda context, option, value: "" if value == "auto" else value,
    help="Whose files and memory are meant; auto: files of either, memory as this machine would take it.",
)


@click.group(short_help="List, download and remove models.")
def models() -> None:
    """List, download, describe and remove models.

    MODEL is a catalogue alias (qwen3-4b), one of its variants (qwen3-4b:gguf; `info` names them), or a hub
    repository (owner/name).
    """


@models.command("list")
@_backend
@_as_json
def list_(backend: str, as_json: bool) -> None:
    """The catalogue, which of it is on this machine, and what fits into its memory."""
    found = hub.list_models(backend)
    if as_json:
        click.echo(json.dumps([_facts(status, backend) for status in found], ensure_ascii=False))
        return
    rows = [("", "name", "here", "memory", "licence", "title")]
    for status in found:
        card = status.card
        here = "-" if status.size is None else size(status.size)
        mark = "*" if card and card.default else ""
        licence, title = (card.licence, card.title) if card else ("", "")
        room = fit.fit_of(status, backend=backend)
        refused = room is None and fit.refusal(status, backend) is not None
        said = "✗ refused, see info" if refused else _room(room)
        rows.append((mark, sanitize(status.name), here, said, licence, title))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@models.command()
@click.argument("model", default="")
@_backend
@click.option("--offline", is_flag=True, hidden=True)
def pull(model: str, backend: str, offline: bool) -> None:
    """Download MODEL (the default model if none is named) and check it; a cached one is checked again."""
    if offline:
        raise UsageError("models pull --offline", "a download needs the network", "drop --offline")
    resolved = hub.pull(model, backend=backend, progress=True)
    say(f"{resolved.name} from {resolved.source} is complete")
    click.echo(resolved.path)


@models.command()
@click.argument("model")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Delete the downloads of MODEL."""
    if not model:  # the default one elsewhere; here, as likely a variable that is not set
        raise UsageError("models rm: no model is named", "allowed: an alias or a hub repository")
    status = hub.info(model)
    if not yes and status.size is not None:
        if not sys.stdin.isatty():
            raise UsageError(
                f"models rm {model} asks before it deletes", "there is no terminal to ask on", "add --yes"
            )
        click.confirm(f"Delete {status.name} ({size(status.size)})?", abort=True, err=True)
    freed = hub.remove(model)
    say(f"{status.name} is deleted, {size(freed)} are free again")


@models.command()
@click.argument("model", default="")
@_backend
@_as_json
def info(model: str, backend: str, as_json: bool) -> None:
    """What is known of MODEL (the default model if none is named)."""
    facts = _facts(hub.info(model, backend), backend)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {' '.join(sanitize(_shown(value)).split())}")


def _facts(status: hub.ModelStatus, backend: str) -> dict[str, Any]:
    card, room = status.card, fit.fit_of(status, backend=backend)
    refused = fit.refusal(status, backend) if room is None else None
    return {
        "name": status.name,
        "title": card.title if card else None,
        "default": bool(card and card.default),
        "licence": card.licence if card else None,
        "family": card.family if card else None,
        "context": card.context if card else None,
        "parameters": card.parameters if card else None,
        "verified": bool(card and card.verified),
        "variants": [f"{card.alias}:{variant}" for variant in card.variants] if card else [],
        "draft": card.draft or None if card else None,
        "sampling": dict(card.sampling) if card else {},
        "thinking": card.thinking or None if card else None,
        "notes": card.notes or None if card else None,
        "cached": status.path is not None,
        "path": str(status.path) if status.path else None,
        "size": status.size,
        "needed_bytes": room.needed_bytes if room else None,
        "available_bytes": room.available_bytes if room else None,
        "fits": room.fits if room else None,
        "memory": room.why if room else None,
        "refused": str(refused) if refused else None,
        "revision": status.revision or None,
        "source": status.source,
    }


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "-"
    return "-" if value is None else str(value)


def _room(found: fit.Fit | None) -> str:
    if found is None:
        return "? unknown"
    if not found.fits:
        needed, free = size(found.needed_bytes), size(found.available_bytes)
        return f"✗ needs {needed} of {free}"
    return f"{'≈ tight' if found.tight else '✓ fits'}, {size(found.needed_bytes)}"
