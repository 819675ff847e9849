"""`ferrum-mlx doctor`: what this machine offers, and what would be used."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from heapq import merge
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, starmap
from operator import itemgetter
from pathlib import Path

import click

from ferrum_mlx.cli.narrate import say, say_note
from ferrum_mlx.errors import BackendUnavailableError

Survey = Iterator[tuple[str, bool, str]]  # see build.zoo_survey

_PACKAGES = ("mlx", "mlx-lm", "torch", "transformers", "numpy", "textual")
_ZOOS = {"mlx": "mlx-lm", "torch": "transformers"}  # whose model types a backend runs
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@click.command(short_help="Show what this machine offers and what would be used.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--zoo", is_flag=True, help="Build every model type tiny and check it here (a minute).")
def doctor(as_json: bool, zoo: bool) -> None:
    """Show device, backend and why, matmul route, memory, cache, versions and the default model."""
    if zoo:
        _zoo(as_json)
        return
    facts: dict[str, str] = {}
    for section in (_versions, _backend, _memory, _models):
        facts |= _facts_of(section)
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


def _facts_of(section: Callable[[], dict[str, str]]) -> dict[str, str]:
    """A section's facts; what is broken or absent is itself a fact, never a crash."""
    try:
        return section()
    except Exception as error:
        said = " ".join(str(error).split())
        return {section.__name__.strip("_"): f"not available: {said or type(error).__name__}"}


def _versions() -> dict[str, str]:
    return {
        "ferrum-mlx": _version("ferrum-mlx"),
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": f"{platform.platform()} {platform.machine()}",
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _backend() -> dict[str, str]:
    from ferrum_mlx.build import doctor_facts

    return doctor_facts()


def _memory() -> dict[str, str]:
    import psutil

    memory = psutil.virtual_memory()
    limits = [f"{_size(limit)} by {name}" for name, limit in _limits() if limit < memory.total]
    return {
        "memory": f"{_size(memory.total)}, {_size(memory.available)} available",
        "memory_limits": ", ".join(limits) or "none",
    }


def _limits() -> list[tuple[str, int]]:
    import resource

    found = [("ulimit -v", resource.getrlimit(resource.RLIMIT_AS)[0])]
    found += [
        ("its cgroup", int(text)) for path in map(Path, _CGROUP_LIMITS) if (text := _read(path)).isdigit()
    ]
    return [(name, limit) for name, limit in found if limit >= 0]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _models() -> dict[str, str]:
    from ferrum_mlx import hub

    return hub.doctor_facts()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
