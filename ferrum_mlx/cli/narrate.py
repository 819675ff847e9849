"""What commands tell people on stderr; stdout is data."""

from __future__ import annotations

import sys
from time import perf_counter

import click

from ferrum_mlx.messages import Finished, Ready
from ferrum_mlx.metrics import RequestStats
from ferrum_mlx.sanitize import sanitize


def say(what: str) -> None:
    """One line of narration, safe for a terminal: a model's files may have worded it."""
    click.echo(sanitize(what), err=True)


def say_note(what: str) -> None:
    """What a user must know of the engine."""
    say(f"note: {what}")


class Thoughts:
    """What models think, dim on stderr if that is a terminal, else left out: it is no narration."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._open = False
        self._began = 0.0

    def show(self, thinking: str) -> None:
        if thinking:
            self._began = self._began or perf_counter()
        if thinking and self._wanted:
            self._open = True
            click.secho(sanitize(thinking), nl=False, err=True, dim=True)

    def seconds(self) -> float:
        """Since the first of it; 0 where there was none."""
        return perf_counter() - self._began if self._began else 0.0

    def end(self) -> None:
        """Before anything else is printed."""
        if self._open:
            self._open = False
            click.echo("\n", err=True)


def introduce(ready: Ready) -> None:
    """Which model runs where and why, and what a user must know of it."""
    info = ready.info
    say(f"{info.model_id} on {ready.backend}, {info.device} ({ready.backend_reason})")
    if info.quality:
        say(f"weights: {info.quantization}; {info.quality}")
    for note in ready.notes:
        say_note(note)


def summarize(end: Finished) -> None:
    """The closing line of a request."""
    usage, timings = end.usage, end.timings
    say(
        f"[{end.finish_reason}: {usage.completion_tokens} tokens, {timings.decode_tps:.1f} tok/s, "
        f"first after {timings.ttft_s:.2f} s; prompt {usage.prompt_tokens} tokens, "
        f"{usage.cached_tokens} cached, {timings.prefill_tps:.0f} tok/s{_guesses(end.stats)}]"
    )


def _guesses(stats: RequestStats) -> str:
    if not stats.drafted_tokens:
        return ""
    return f"; {stats.accepted_tokens} of {stats.drafted_tokens} guesses right"
