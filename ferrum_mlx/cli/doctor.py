"""`ferrum-mlx doctor`: what this machine offers, and what would be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import merge
from itertools import groupby, starmap
from operator import itemgetter

import click

from ferrum_mlx.cli import doctor_facts
from ferrum_mlx.cli.narrate import say, say_note
from ferrum_mlx.errors import BackendUnavailableError

Survey = Iterator[tuple[str, bool, str]]  # see build.zoo_survey

_ZOOS = {"mlx": "mlx-lm", "torch": "transformers"}  # whose model types a backend runs


@click.command(short_help="Show what this machine offers and what would be used.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--zoo", is_flag=True, help="Build every model type tiny and check it here (a minute).")
def doctor(as_json: bool, zoo: bool) -> None:
    """Show what a bug report needs: versions, device, backend and why, memory, cache, network, terminal."""
    if zoo:
        _zoo(as_json)
        return
    facts = doctor_facts.collect()
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


def _zoo(as_json: bool) -> None:
    """A line a model type as it is checked, a column a backend; a dash where its library has no such type."""
    surveys = _surveys()
    table: dict[str, dict[str, str]] = {}  # by type and backend; of a type's configurations the worst
    if not as_json:
        click.echo(_row("", list(surveys)))
    for name, outcomes in _joined(surveys):
        if not as_json:
            words = [outcomes.get(backend, "-").partition(":")[0] for backend in surveys]
            whys = [f"{backend} {outcome}" for backend, outcome in outcomes.items() if ":" in outcome]
            click.echo(_row(name, words, "; ".join(whys)))
        row = table.setdefault(name.split("/")[0], {})
        row |= {backend: outcome for backend, outcome in outcomes.items() if not _refused(row.get(backend))}
    if as_json:
        click.echo(json.dumps(table, ensure_ascii=False))
    for backend in surveys:
        found = [row[backend] for row in table.values() if backend in row]
        refused = sum(map(_refused, found))
        exact = len(found) - refused
        say(f"{backend}: {exact} model types of {_ZOOS[backend]} exact here, {refused} refused")


def _refused(outcome: str | None) -> bool:
    return outcome is not None and outcome.startswith("refused")


def _surveys() -> dict[str, Survey]:
    """By backend; what is not installed is said."""
    from ferrum_mlx.build import zoo_survey

    surveys: dict[str, Survey] = {}
    for backend in _ZOOS:
        try:
            surveys[backend] = zoo_survey(backend)
        except BackendUnavailableError as error:
            say_note(f"no column for {backend}: {error}")
    return surveys


def _joined(surveys: dict[str, Survey]) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, backend → outcome) in the order of names, which is each survey's own."""

    def told(backend: str, survey: Survey) -> Iterator[tuple[str, str, str]]:
        for name, exact, why in survey:
            yield name, backend, ": ".join(filter(None, ("exact" if exact else "refused", why)))

    rows = merge(*starmap(told, surveys.items()), key=lambda row: (row[0].lower(), row[0]))
    for name, group in groupby(rows, key=itemgetter(0)):
        yield name, {backend: outcome for _, backend, outcome in group}


def _row(name: str, words: list[str], why: str = "") -> str:
    return f"{name:27}{''.join(f'{word:9}' for word in words)}{why}".rstrip()
