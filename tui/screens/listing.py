"""What the model picker and the empty chat say of models. No network; everything here is for a thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ferrum_mlx import hub
from ferrum_mlx.catalog import Card, choose
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.fit import Fit, backend_here, fit_of, refusal
from ferrum_mlx.plain import size

from .finder import Cell

_LEAST, _MOST = 3, 5  # suggestions
_DIM = "dim"  # and no colour, which might be that of the highlighted row


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model in a list.

    Attributes:
        name: what a user calls it.
        size: bytes on this disk, or to download; None if nobody has said.
        here: it can be used without the network.
        partial: bytes of an interrupted download.
        fit: None where it cannot be told, or is refused.
        context: tokens; None if there is no card.
        verified: the card has been checked against the files.
        refused: why loading would refuse it, on one line.
    """

    name: str
    title: str
    size: int | None
    here: bool
    partial: int
    fit: Fit | None
    licence: str
    context: int | None
    verified: bool
    refused: str = ""


FitOf = Callable[[hub.ModelStatus], Fit | None]


def entries(fit: FitOf | None = None, backend: str = "") -> list[Entry]:
    """The catalogue, the default first, then other models in the hub's cache.

    Args:
        backend: mlx or torch, whose files are meant; "" is for any.
    """
    return [entry(status, fit, backend) for status in hub.list_models(backend)]


def entry(status: hub.ModelStatus, fit: FitOf | None = None, backend: str = "") -> Entry:
    card, here = status.card, status.path is not None
    room = (fit or memory_fit)(status)
    refused = refusal(status, backend) if room is None else None
    return Entry(
        name=status.name,
        title=card.title if card else "",
        size=status.size if here else _to_download(card, backend),
        here=here,
        partial=0 if here else hub.partial_size(status.name, backend),
        fit=room,
        refused=_reason(refused, status) if refused else "",
        licence=card.licence if card else "",
        context=card.context if card else None,
        verified=bool(card and card.verified),
    )


def _reason(refused: FerrumError, status: hub.ModelStatus) -> str:
    """On one line, which has no room for a path in a cache."""
    said = str(refused) if status.path is None else str(refused).replace(str(status.path), status.name)
    return " ".join(said.split())


def suggestions(fit: FitOf | None = None, backend: str = "") -> list[Entry]:
    """_LEAST to _MOST models for a first run: of the catalogue, what fits this machine; what is here first.

    Where fewer are known to fit, those that need least stand behind them; a list has to say so.
    """
    found = [each for each in entries(fit, backend) if each.licence and not each.refused]
    fitting = sorted(filter(fits, found), key=lambda each: not each.here)[:_MOST]
    others = sorted((each for each in found if not fits(each)), key=_needed)
    return fitting + others[: max(_LEAST - len(fitting), 0)]


def fits(entry: Entry) -> bool:
    """Whether a model is known to fit."""
    return entry.fit is not None and entry.fit.fits


def _needed(entry: Entry) -> float:
    return entry.fit.needed_bytes if entry.fit is not None else math.inf


def for_engine(config: EngineConfig) -> tuple[FitOf, str]:
    """How models fit into an engine of these settings, and the backend whose files it reads."""
    backend = backend_here(config.backend)
    return partial(memory_fit, kv_bits=config.kv_bits, backend=backend), backend


def memory_fit(status: hub.ModelStatus, kv_bits: int | None = None, backend: str = "") -> Fit | None:
    """For one sequence of the default context; "" is the backend that this machine would choose."""
    return fit_of(status, backend=backend, kv_bits=kv_bits)


def _to_download(card: Card | None, backend: str) -> int | None:
    choice = choose(card.alias, backend) if card else None
    return choice.sources[0].size if choice else None


def size_cell(entry: Entry) -> Cell:
    if entry.here:
        return (size(entry.size or 0), "bold")
    if entry.partial:
        share = f"{entry.partial / entry.size:.0%} of " if entry.size else ""
        return (f"◐ {share}{size(entry.size or entry.partial)}", "$text-warning")
    return (f"↓ {size(entry.size) if entry.size else '?'}", _DIM)


def fit_cells(entry: Entry) -> tuple[Cell, Cell]:
    """A glyph, and the same in words."""
    fit = entry.fit
    if entry.refused:
        return ("✗", "$text-error"), ("refused", "$text-error")
    if fit is None:
        return ("?", _DIM), ("unknown", _DIM)
    if not fit.fits:
        needed = f"too big: needs {size(fit.needed_bytes)} of {size(fit.available_bytes)}"
        return ("✗", "$text-error"), (needed, "$text-error")
    if fit.tight:
        return ("≈", "$text-warning"), ("tight", "$text-warning")
    return ("✓", "$text-success"), ("fits", "$text-success")


def cells(entry: Entry, current: bool) -> list[Cell]:
    """A row: mark, name, size, fit as glyph and in words, licence, context, state; DROP says what may go."""
    context = f"{entry.context / 1024:,.0f}k" if entry.context else ""
    state = "here" if entry.here else ""
    if entry.verified:
        state = f"{state} verified".strip()
    return [
        ("●" if current else " ", "bold $text-accent"),
        (entry.name, "bold"),
        size_cell(entry),
        *fit_cells(entry),
        (entry.licence, ""),
        (context, ""),
        (state, _DIM),
    ]


def detail(entry: Entry) -> str:
    """What a row has no room for, on one line."""
    if entry.refused:
        return entry.refused
    context = f"context {entry.context:,}" if entry.context else ""
    parts = (entry.title, entry.licence, context, f"memory: {fit_cells(entry)[1][0]}")
    return " · ".join(part for part in parts if part)


NAME = 1
DROP = (7, 6, 5, 4)
HEADINGS = ("", "model", "size", "", "memory", "licence", "context", "")
