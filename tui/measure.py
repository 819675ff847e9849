"""What the screen costs, against its targets: `python -m ferrum_tui.measure`.

The real program on a pseudo-terminal, with the model that the chat would take. Speeds are the engine's own,
out of its records (`--events`), for the screen and for `--plain` alike: the same prompt, and, which is
compared, the same answer. Nothing else should run meanwhile; every figure is a median.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import median

import click

from .escape import ESC_DELAY
from .flushes import KINDS, flush_seconds
from .trial import HEAVY, PROMPT, Answered, Trial, chat, plain, steps_after

_IDLE = 10.0  # seconds that are looked at
_LONG = 100  # turns of the conversation that is idle, too
_ESC, _ESC_OF_KITTY = "\x1b", "\x1b[27u"


@click.command()
@click.option("--pairs", default=5, show_default=True, help="Runs of each, what is compared alternating.")
def main(pairs: int) -> None:
    """Print each figure beside its target; exit 1 if one is missed."""
    rows = [*_speeds(pairs), *_flushes(pairs), *_moments(pairs)]
    for what, figure, target, met in rows:
        click.echo(f"{what}: {figure}; {'met' if met else 'MISSED'}: {target}")
    sys.exit(0 if all(met for *_, met in rows) else 1)


Row = tuple[str, str, str, bool]  # what, figure, target, whether it is met


def _speeds(pairs: int) -> Iterator[Row]:
    """The screen's speed over that of the linear mode, by threads of the engine."""
    compared: list[tuple[Answered, Answered]] = []
    for threads in (1, 2):
        ratios = []
        for pair in range(pairs):
            runs = (_with_screen, plain) if pair % 2 else (plain, _with_screen)
            done = {run: run(threads) for run in runs}
            compared.append((done[_with_screen], done[plain]))
            ratios.append(done[_with_screen].tokens_per_second / done[plain].tokens_per_second)
        figure = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        met = threads > 1 or median(ratios) >= 0.97
        target = "at least 0.97" if threads == 1 else "no target, the screen has no core of its own"
        yield (
            f"tok/s with the screen ÷ --plain, {threads} engine thread{'s' * (threads > 1)}",
            figure,
            target,
            met,
        )
    yield same_answers(compared)


def same_answers(pairs: list[tuple[Answered, Answered]]) -> Row:
    """Speeds are only to be compared where both runs did the same."""
    same = sum((one.text, one.tokens) == (other.text, other.tokens) for one, other in pairs)
    figure = f"{same} of {len(pairs)} pairs, {pairs[0][0].tokens} tokens"
    return "the same answer with the screen and --plain", figure, "all", same == len(pairs)


def _flushes(pairs: int) -> Iterator[Row]:
    """CPU seconds to show the next characters of an answer, at 400 lines over that at 10."""
    for kind in KINDS:
        taken = [(flush_seconds(kind, 10), flush_seconds(kind, 400)) for _ in range(pairs)]
        ratio = median(many / few for few, many in taken)
        few, many = (1000 * median(values) for values in zip(*taken, strict=True))
        figure = f"{ratio:.2f} ({few:.1f} and {many:.1f} ms)"
        yield f"CPU of a flush at 400 lines ÷ at 10, {kind}", figure, "at most 2", ratio <= 2


def _moments(times: int) -> Iterator[Row]:
    paints, lasts, idles, long_idles = [], [], [], []
    stops: dict[str, list[tuple[float, int]]] = {_ESC: [], _ESC_OF_KITTY: []}
    heavy: set[str] = set()
    for _ in range(times):
        began = time.time()
        with chat(1) as trial:
            paints.append(trial.terminal.wait_for("Ask something") - began)
            heavy |= trial.imported() & set(HEAVY)
            trial.terminal.wait_for("ready")
            lasts.append(_last_token(trial))
            idles.append(trial.idle(_IDLE))
        for key, seen in stops.items():
            with chat(1, "--max-tokens", "2000") as trial:
                trial.terminal.wait_for("ready")
                seen.append(_stop(trial, key))
        with chat(1, turns=_LONG) as trial:
            trial.terminal.wait_for("ready")
            long_idles.append(trial.idle(_IDLE))
    yield "first paint", f"{median(paints):.2f} s", "at most 1 s", median(paints) <= 1
    names = ", ".join(HEAVY)
    yield "imported at the first paint", ", ".join(sorted(heavy)) or "none", f"none of {names}", not heavy
    for key, name in (
        (_ESC, f"Esc, known from other keys after {ESC_DELAY} ms"),
        (_ESC_OF_KITTY, "Esc of a terminal with Kitty's protocol"),
    ):
        shown, steps = (median(values) for values in zip(*stops[key], strict=True))
        yield f"{name}, to “stopping” on the screen", f"{shown:.0f} ms", "at most 100 ms", shown <= 100
        yield f"{name}: forwards that end after it", f"{steps:g}", "at most 1, the one it is in", steps <= 1
    yield "last token to the screen", f"{median(lasts):.0f} ms", "at most 150 ms", median(lasts) <= 150
    yield "CPU while idle", f"{median(idles):.2%}", "below 1 %", median(idles) < 0.01
    figure = f"{median(long_idles):.2%}"
    yield f"CPU while idle behind {_LONG} turns", figure, "below 1 %", median(long_idles) < 0.01


def _with_screen(threads: int) -> Answered:
    with chat(threads) as trial:
        trial.terminal.wait_for("ready")
        trial.terminal.send(PROMPT + "\r")
        return trial.answered()


def _last_token(trial: Trial) -> float:
    """Milliseconds from the end of an answer in the engine to its line on the screen."""
    trial.terminal.send(PROMPT + "\r")
    seen = trial.terminal.wait_for("tok/s · TTFT")
    ended = next(record for record in trial.records() if record["event"] == "finished")
    return 1000 * float(seen - ended["time"])


def _stop(trial: Trial, key: str) -> tuple[float, int]:
    """Milliseconds from a key to what the screen says of it, and the forwards that ended after it."""
    trial.terminal.send(PROMPT + "\r")
    trial.terminal.wait_for("generating")
    trial.read_for(1.0)
    began = time.time()
    trial.terminal.send(key)
    seen = trial.terminal.wait_for("stopp")  # "stopping", or "stopped" where that is sooner than a flush
    trial.wait_for_record("aborted")
    return 1000 * (seen - began), steps_after(trial.records(), began)


if __name__ == "__main__":
    main()
