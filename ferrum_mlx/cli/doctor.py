"""`ferrum-mlx doctor`: what this machine offers, and what would be used."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from ferrum_mlx.cli.narrate import say

_PACKAGES = ("mlx", "mlx-lm", "torch", "transformers", "numpy", "textual")
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
    """One line a model type as it is checked; of several configurations of a type the worst counts."""
    from ferrum_mlx.build import zoo_survey

    outcomes: dict[str, str] = {}
    for name, outcome in zoo_survey():
        if not as_json:
            click.echo(f"{name:22}  {outcome}")
        model_type = name.split("/")[0]
        if not outcomes.get(model_type, "").startswith("refused"):
            outcomes[model_type] = outcome
    exact = sum(outcome.startswith("exact") for outcome in outcomes.values())
    if as_json:
        click.echo(json.dumps(outcomes, ensure_ascii=False))
    say(f"{exact} of mlx-lm's model types are exact here, {len(outcomes) - exact} are refused")


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
