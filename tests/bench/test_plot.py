"""The chart, where matplotlib is; and one line where it is not, before anything is measured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ferrum_mlx.bench import plot, workloads
from ferrum_mlx.bench.report import Report
from ferrum_mlx.errors import FerrumError, UsageError

from .test_report import report  # noqa: F401 - a fixture


def test_no_matplotlib_no_chart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(FerrumError, match=r"pip install 'ferrum-mlx\[plot\]'"):
        plot.check(str(tmp_path / "chart.svg"))


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "nowhere/chart.svg"])
def test_a_file_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"allowed: a (name that ends in .png or .svg|file in a folder)"):
        plot.check(str(tmp_path / name))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_chart_is_drawn(report: Report, suffix: str, magic: bytes, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / f"chart{suffix}"
    plot.check(str(file))
    plot.draw(report, [workloads.decode(8, 0, 1, 512), workloads.prefill(64, 0, 4)], str(file))
    assert file.read_bytes().startswith(magic)
    if suffix == ".svg":
        assert "tokens a second" in file.read_text(encoding="utf-8")
