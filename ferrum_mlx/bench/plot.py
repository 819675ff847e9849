"""A chart of a report: each test's main figure, a bar a system, with the standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ferrum_mlx.bench.workloads import Case
from ferrum_mlx.errors import FerrumError, UsageError

if TYPE_CHECKING:
    from ferrum_mlx.bench.report import Line, Report

_FORMATS = (".png", ".svg")
_LEVEL = 6  # names that stand side by side; more are turned
_LABELS = {"_tps": "tokens a second", "_s": "milliseconds; less is better"}


def check(path: str) -> None:
    """Refuse a file that could not be written in the end, before anything is measured."""
    file = Path(path)
    if file.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot {path}", f"allowed: a name that ends in {' or '.join(_FORMATS)}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}", "allowed: a file in a folder that exists")
    if find_spec("matplotlib") is None:
        raise FerrumError(
            "--plot: the package matplotlib is not installed", next_step="pip install 'ferrum-mlx[plot]'"
        )


def draw(report: Report, cases: Sequence[Case], path: str) -> None:
    """Write the chart; one row for speeds, one for gaps, as far as there are any.

    Raises:
        FerrumError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window, whatever the user's settings
    from matplotlib import pyplot

    main = {(case.name, case.streams): case.main for case in cases}
    rows = []
    for ending, label in _LABELS.items():
        lines = [line for line in report.lines if _is(main[line.test, line.streams], ending, line)]
        if lines:
            rows.append((label, 1 if ending == "_tps" else 1000, lines))
    figure, axes = pyplot.subplots(max(1, len(rows)), squeeze=False, layout="constrained", figsize=(9, 4.5))
    for axis, (label, scale, lines) in zip(axes[:, 0], rows, strict=False):
        _bars(axis, label, scale, lines, main)
    figure.suptitle(f"{report.engine['model']} on {report.engine['backend']}, {report.machine['cpu']}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise FerrumError(f"--plot {path}: {error.strerror}", next_step="draw it elsewhere") from error
    finally:
        pyplot.close(figure)


def _is(figure: str, ending: str, line: Line) -> bool:
    return figure.endswith(ending) and figure in line.figures


def _bars(
    axis: object, label: str, scale: int, lines: Sequence[Line], main: dict[tuple[str, int], str]
) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    tests = list(dict.fromkeys((line.test, line.streams) for line in lines))
    systems = list(dict.fromkeys(line.system for line in lines))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        own = [line for line in lines if line.system == system]
        found = [line.figures[main[line.test, line.streams]] for line in own]
        places = [tests.index((line.test, line.streams)) + width * (number + 0.5) - 0.4 for line in own]
        heights, errors = [scale * f.mean for f in found], [scale * f.sd for f in found]
        axis.bar(places, heights, width, yerr=errors, capsize=3, label=system)
    names = [f"{test} × {streams}" if streams > 1 else test for test, streams in tests]
    axis.set_xticks(range(len(tests)), names, rotation=15 if len(tests) > _LEVEL else 0)
    axis.set_ylabel(label)
    axis.legend()
