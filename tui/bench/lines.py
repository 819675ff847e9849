"""A benchmark as lines of text, one function a part of the screen; table.py has the tests."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content

from ferrum_mlx.bench.checks import DIFFERS, EQUAL, FAULT, NEAR_TIE, NOT_CHECKED

from ..engine.format import Part, bar, fit
from .board import Board
from .table import LEFT_OUT, case_of, clean, system_of, tables

_OUTCOMES = {
    EQUAL: ("✓", "$text-success"),
    NEAR_TIE: ("≈", "$text-warning"),
    DIFFERS: ("≠", "$text-warning"),
    NOT_CHECKED: ("–", "dim"),
    FAULT: ("✖", "$text-error"),
}
_WIDEST_BAR, _NARROWEST_BAR = 40, 8


def title(board: Board, width: int) -> list[Content]:
    groups: list[list[Part]] = [[("ferrum bench", "bold")]]
    if board.ready is not None:
        groups += [[(clean(board.ready.info.model_id), "bold $accent")]]
        groups += [[(clean(f"{board.ready.backend}, {board.ready.info.device}"), "")]]
    if board.plan is not None:
        groups += [[(_counted(board.plan.reps, "repetition"), "")], [(f"seed {board.plan.seed}", "")]]
    return [fit(groups, width)]


def progress(board: Board, width: int) -> list[Content]:
    """What runs now, and how much of all is done."""
    if board.stopping:
        now = Content.assemble(("■ ", "$text-warning"), "stopping; the report of what was measured comes")
    elif board.now is not None:
        row = next(row for row in board.rows if row.key == board.now.key)
        which: list[Part] = [(f"{case_of(row.key)}, {system_of(row)}", "bold")]
        times: list[Part] = [(f"{board.now.rep + 1} of {row.repetitions}", "")]
        since: list[Part] = [(f"since {board.moment}", "dim")]
        now = Content.assemble(("▶ ", "$accent"), fit([which, times, since], width - 2))
    else:
        now = Content.assemble(("… ", "dim"), clean(board.said))
    return [now, _amount(board, width)]


def _amount(board: Board, width: int) -> Content:
    total = board.total
    count = f"{board.done} of {_counted(total, 'run')}" if total else "nothing measured yet"
    times: list[list[Part]] = [[(count, "")], [(f"{_clock(board.elapsed)} gone", "dim")]]
    if board.rest is not None:
        times.append([(f"about {_clock(board.rest)} to go", "dim")])
    said = fit(times, width)
    room = min(_WIDEST_BAR, width - said.cell_length - 2)
    if room < _NARROWEST_BAR:
        return said
    return Content.assemble(bar(board.done / total if total else 0.0, room), "  ", said)


def results(board: Board, width: int) -> list[Content]:
    """The tests, then what must be known of them."""
    tests = list(tables(board, width))
    notes = [*_checks(board), *_left_out(board), *_machine(board)]
    gap = [Content("")] if tests and notes else []
    return [*tests, *gap, *(line for note in notes for line in _wrapped(note, width))]


def _wrapped(note: Content, width: int) -> Iterator[Content]:
    """With its glyph out in front."""
    for number, line in enumerate(note.wrap(max(1, width - 2))):
        yield Content.assemble("  ", line) if number else line


def keys(board: Board, width: int) -> list[Content]:
    stop = " ends it now, without a report" if board.stopping else " stop, with a report"
    groups: list[list[Part]] = [
        [("q", "bold $accent"), (stop, "")],
        [("↑ ↓ PgUp PgDn", "bold $accent"), (" scroll", "")],
        [("drawn between runs only", "dim")],
    ]
    return [fit(groups, width)]


def _checks(board: Board) -> Iterator[Content]:
    for check in board.checks:
        yield Content.assemble(_OUTCOMES[check.outcome], " ", clean(str(check)))


def _left_out(board: Board) -> Iterator[Content]:
    for peer, why in board.absent.items():
        yield Content.assemble(LEFT_OUT, f" absent: {clean(peer)}, ", (clean(why), "dim"))
    for key, why in board.skipped.items():
        which = f" left out: {case_of(key)} on {clean(key[2])}, "
        yield Content.assemble(LEFT_OUT, which, (clean(why), "dim"))


def _machine(board: Board) -> Iterator[Content]:
    if board.bandwidth:
        shares = [
            f"{case_of(key)} reaches {line.figures['bandwidth_fraction'].median:.0%}"
            for key, line in board.lines().items()
            if "bandwidth_fraction" in line.figures
        ]
        read = f"memory is read at {board.bandwidth / 1e9:.1f} GB/s here"
        yield Content("; ".join([read, ", ".join(shares)] if shares else [read]))
    if board.ready is not None:
        info = board.ready.info
        weights = [f"weights: {info.quantization}; {info.quality}"] if info.quality else []
        for fact in (*weights, *(f"note: {note}" for note in board.ready.notes)):
            yield Content.styled(clean(fact), "dim")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count:,} {what}s"
