"""The Markdown form of a report: tables of what was measured, and lines of what must be known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrum_mlx.bench.report import Line, Report, Spread

# figure → (heading, how a value is shown)
_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "prefill_tps": ("prefill tok/s", lambda value: f"{value:.1f}"),
    "decode_tps": ("decode tok/s", lambda value: f"{value:.1f}"),
    "output_tps": ("output tok/s", lambda value: f"{value:.1f}"),
    "call_s": ("call µs", lambda value: f"{1e6 * value:.0f}"),
    "read_bytes_per_s": ("read GB/s", lambda value: f"{value / 1e9:.1f}"),
    "ttft_s": ("TTFT s", lambda value: f"{value:.3f}"),
    "itl_p50_s": ("ITL p50 ms", lambda value: f"{1000 * value:.1f}"),
    "itl_p90_s": ("p90 ms", lambda value: f"{1000 * value:.1f}"),
    "itl_p99_s": ("p99 ms", lambda value: f"{1000 * value:.1f}"),
    "quiet_gap_s": ("quiet gap ms", lambda value: f"{1000 * value:.1f}"),
    "longest_gap_s": ("longest gap ms", lambda value: f"{1000 * value:.1f}"),
    "gap_ratio": ("longest ÷ quiet", lambda value: f"{value:.1f}"),
    "cached_tokens": ("cached", lambda value: f"{value:.0f}"),
    "outside_forward": ("outside forward", lambda value: f"{100 * value:.1f} %"),
    "acceptance_rate": ("accepted", lambda value: f"{100 * value:.0f} %"),
    "acceptance_length": ("mean length", lambda value: f"{value:.2f}"),
    "kv_bytes": ("KV MB", lambda value: f"{value / 1e6:.1f}"),
    "step_bytes": ("read a step MB", lambda value: f"{value / 1e6:.0f}"),
    "bandwidth_fraction": ("of bandwidth", lambda value: f"{100 * value:.0f} %"),
    "peak_memory_bytes": ("peak arrays MB", lambda value: f"{value / 1e6:.0f}"),
}
_SPREADS = (
    "prefill_tps",
    "decode_tps",
    "output_tps",
    "call_s",
    "ttft_s",
    "longest_gap_s",
)  # shown with sd and median
_TABLES = (
    "prefill_tps",
    "decode_tps",
    "output_tps",
    "quiet_gap_s",
    "call_s",
)  # a table each, by what is measured


def document(report: Report) -> str:
    lines = report.lines
    parts = [_facts(report)] + [
        _results([line for line in lines if _table_of(line) == key]) for key in _TABLES
    ]
    if ratios := report.ratios:
        parts.append(_ratio_table(report.ours, ratios))
    notes = [str(check) for check in report.results.checks.values()]
    notes += [f"absent: {peer}, {why}" for peer, why in report.absent.items()]
    notes += [
        f"left out: {_test(test, streams)} on {system}, {why}"
        for (test, streams, system), why in report.results.skipped.items()
    ]
    guessed = any("acceptance_rate" in line.figures for line in lines)
    if (why := report.engine["speculation_why"]) and not guessed:
        notes.append(f"nothing was guessed: {why}")
    if not report.complete:
        notes.append("interrupted: what was measured until then")
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(part for part in parts if part)


def _facts(report: Report) -> str:
    engine, machine = report.engine, report.machine
    lines = [
        f"{engine['model']} on {engine['backend']}, {engine['device']}, {engine['dtype']}, "
        f"numerics {engine['numerics']}, quantization {engine['quantization']}",
        f"{_mb(engine, 'parameter_bytes')} of weights, "
        f"{_mb(engine, 'kv_pool_bytes')} of KV pool, peak RSS {_mb(engine, 'peak_rss_bytes')}",
        f"{machine['cpu']}, {machine['cores']} cores, threads used: {machine['threads']}, "
        f"{machine['system']}; "
        f"{report.settings['tool']}, {report.settings['reps']} repetitions, seed {report.settings['seed']}",
    ]
    if engine["quality"]:
        lines.append(f"packing the weights: {engine['quality']}")
    if report.bandwidth:
        lines.append(f"memory is read at {report.bandwidth / 1e9:.1f} GB/s here, measured in this run")
    lines.append("mean ± sd (median) over the repetitions; other columns: medians")
    return "\n".join(f"- {line}" for line in lines)


def _mb(facts: Mapping[str, object], name: str) -> str:
    value = facts[name]
    assert isinstance(value, int)
    return f"{value / 1e6:.0f} MB"


def _results(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    names = [name for name in _COLUMNS if any(name in line.figures for line in lines)]
    rows = [["test", "system", *(_COLUMNS[name][0] for name in names)]]
    for line in lines:
        cells = [_cell(name, line.figures.get(name)) for name in names]
        rows.append([_test(line.test, line.streams), f"{line.system} {line.method}".strip(), *cells])
    return _table(rows)


def _table_of(line: Line) -> str:
    """A line of an admission has a prefill speed, too, and one of several streams two speeds."""
    if "quiet_gap_s" in line.figures:
        return "quiet_gap_s"
    return next(
        (name for name in ("decode_tps", "output_tps", "call_s") if name in line.figures), "prefill_tps"
    )


def _cell(name: str, found: Spread | None) -> str:
    if found is None:
        return ""
    show = _COLUMNS[name][1]
    if name not in _SPREADS:
        return show(found.median)
    return f"{show(found.mean)} ± {show(found.sd)} ({show(found.median)})"


def _ratio_table(ours: str, lines: Sequence[Line]) -> str:
    rows = [["test", f"{ours} ÷", "figure", "median", "mean ± sd", "range", "pairs"]]
    for line in lines:
        for name, found in line.figures.items():
            heading = _COLUMNS[name][0]
            rows.append(
                [
                    _test(line.test, line.streams),
                    f"{line.system} {line.method}".strip(),
                    heading.rsplit(" ", 1)[0] if name.endswith("_s") else heading,  # without the unit
                    f"{found.median:.2f}",
                    f"{found.mean:.2f} ± {found.sd:.2f}",
                    f"{found.min:.2f} to {found.max:.2f}",
                    str(found.n),
                ]
            )
    return "Above 1, this engine is the faster one.\n\n" + _table(rows)


def _test(name: str, streams: int) -> str:
    return f"{name} × {streams}" if streams > 1 else name


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
