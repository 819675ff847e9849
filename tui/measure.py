"""What the screen costs, against its targets: `python -m ferrum_tui.measure`.

The real program on a pseudo-terminal, with the model that the chat would take. Speeds are the engine's own,
out of its records (`--events`), for the screen and for `--plain` alike: the same prompt, the same tokens.
Nothing else should run meanwhile; every figure is a median.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from .flushes import KINDS, flush_seconds
from .pseudo_terminal import PseudoTerminal

_PROMPT = "Write a long story about a lighthouse keeper and the sea."
_TOKENS = 160
_IDLE = 10.0  # seconds that are looked at
_HEAVY = ("mlx", "torch", "transformers")


@click.command()
@click.option("--pairs", default=5, show_default=True, help="Runs with and without the screen, alternating.")
def main(pairs: int) -> None:
    """Print each figure beside its target; exit 1 if one is missed."""
    rows = [*_speeds(pairs), *_flushes(), *_moments(pairs)]
    for what, figure, target, met in rows:
        click.echo(f"{what}: {figure}; {'met' if met else 'MISSED'}: {target}")
    sys.exit(0 if all(met for *_, met in rows) else 1)


_Row = tuple[str, str, str, bool]  # what, figure, target, whether it is met


def _speeds(pairs: int) -> Iterator[_Row]:
    """The screen's speed over that of the linear mode, by threads of the engine."""
    for threads in (1, 2):
        ratios = []
        for pair in range(pairs):
            run = (_with_screen, _without) if pair % 2 else (_without, _with_screen)
            speeds = {each: each(threads) for each in run}
            ratios.append(speeds[_with_screen] / speeds[_without])
        figure = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        met = threads > 1 or median(ratios) >= 0.97
        target = "at least 0.97" if threads == 1 else "no target, the screen has no core of its own"
        yield (
            f"tok/s with the screen ÷ --plain, {threads} engine thread{'s' * (threads > 1)}",
            figure,
            target,
            met,
        )


def _flushes() -> Iterator[_Row]:
    """CPU seconds to show the next characters of an answer, at 400 lines over that at 10."""
    for kind in KINDS:
        few, many = flush_seconds(kind, 10), flush_seconds(kind, 400)
        figure = f"{many / few:.2f} ({few * 1000:.1f} and {many * 1000:.1f} ms)"
        yield f"CPU of a flush at 400 lines ÷ at 10, {kind}", figure, "at most 2", many <= 2 * few


def _moments(times: int) -> Iterator[_Row]:
    paints, stops, steps, lasts, idles = [], [], [], [], []
    heavy: set[str] = set()
    for _ in range(times):
        began = time.time()
        with _screen(1) as (terminal, records):
            paints.append(terminal.wait_for("Ask something") - began)
            heavy |= _loaded(terminal.process.pid)
            terminal.wait_for("ready")
            lasts.append(_last_token(terminal, records))
            stop, left = _stop(terminal, records)
            stops.append(stop)
            steps.append(left)
            idles.append(_idle(terminal.process.pid))
    yield "first paint", f"{median(paints):.2f} s", "at most 1 s", median(paints) <= 1
    yield (
        "loaded at the first paint",
        ", ".join(sorted(heavy)) or "neither",
        f"none of {', '.join(_HEAVY)}",
        not heavy,
    )
    yield "Esc to “stopping” on the screen", f"{median(stops):.0f} ms", "at most 100 ms", median(stops) <= 100
    yield "steps of the engine after that", f"{max(steps)}", "at most 1, the one it is in", max(steps) <= 1
    yield "last token to the screen", f"{median(lasts):.0f} ms", "at most 150 ms", median(lasts) <= 150
    yield "CPU while idle", f"{median(idles):.2%}", "below 1 %", median(idles) < 0.01


# Runs


def _with_screen(threads: int) -> float:
    with _screen(threads) as (terminal, records):
        terminal.wait_for("ready")
        terminal.send(_PROMPT + "\r")
        return _decode_tps(_until(terminal, records, "finished"))


def _without(threads: int) -> float:
    with _records() as (path, records):
        args = [*_command(path), "--plain"]
        subprocess.run(
            args,
            input=_PROMPT + "\n",
            text=True,
            env=_env(threads, path.parent),
            check=True,
            capture_output=True,
        )
        return _decode_tps(next(record for record in records() if record["event"] == "finished"))


def _last_token(terminal: PseudoTerminal, records: Callable[[], list[Any]]) -> float:
    """Milliseconds from the end of an answer in the engine to its line on the screen."""
    terminal.send(_PROMPT + "\r")
    seen = terminal.wait_for("tok/s · TTFT")
    ended = next(record for record in records() if record["event"] == "finished")
    return 1000 * float(seen - ended["time"])


def _stop(terminal: PseudoTerminal, records: Callable[[], list[Any]]) -> tuple[float, int]:
    """Milliseconds from Esc to what the screen says of it, and the engine's steps that ended after that."""
    terminal.send(_PROMPT + "\r")
    terminal.wait_for("generating")
    time.sleep(1.0)
    began = time.time()
    terminal.send("\x1b")
    seen = terminal.wait_for("stopping")
    terminal.wait_for("stopped")
    _until(terminal, records, "aborted")
    steps = [record for record in records() if record["event"] == "step" and record["time"] > seen]
    return 1000 * (seen - began), len(steps)


def _idle(pid: int) -> float:
    """Share of a core that the screen and its engine take with nothing to do."""
    time.sleep(1.0)
    before = _cpu_seconds(pid)
    time.sleep(_IDLE)
    return (_cpu_seconds(pid) - before) / _IDLE


def _cpu_seconds(pid: int) -> float:
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _loaded(pid: int) -> set[str]:
    """Heavy libraries in the memory of the screen's process."""
    paths = {mapped.path for mapped in psutil.Process(pid).memory_maps()}
    return {name for name in _HEAVY if any(f"/{name}/" in path for path in paths)}


@contextmanager
def _screen(threads: int) -> Iterator[tuple[PseudoTerminal, Callable[[], list[Any]]]]:
    with (
        _records() as (path, records),
        PseudoTerminal(_command(path), _env(threads, path.parent), columns=120, rows=36) as terminal,
    ):
        yield terminal, records


@contextmanager
def _records() -> Iterator[tuple[Path, Callable[[], list[Any]]]]:
    """A file for the engine's records, and what stands in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        yield path, lambda: [json.loads(line) for line in path.read_text().splitlines()]


def _until(terminal: PseudoTerminal, records: Callable[[], list[Any]], event: str) -> Any:
    while True:
        found = [record for record in records() if record["event"] == event]
        if found:
            return found[-1]
        terminal.read()


def _decode_tps(record: Any) -> float:
    return float(record["stats"]["timings"]["decode_tps"])


def _command(events: Path) -> list[str]:
    options = ["--temperature", "0", "--max-tokens", str(_TOKENS), "--offline", "--events", str(events)]
    return [sys.executable, "-m", "ferrum_mlx", "chat", *options]


def _env(threads: int, folder: Path) -> dict[str, str]:
    own = {"FERRUM_DATA": str(folder), "FERRUM_CONFIG": str(folder / "config.toml")}
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **own, **dict.fromkeys(names, str(threads))}


if __name__ == "__main__":
    main()
