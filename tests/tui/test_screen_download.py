"""What a download says of itself, and which models a first run suggests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import hub
from ferrum_mlx.errors import DownloadStoppedError
from ferrum_tui.screens import finder, listing
from ferrum_tui.screens.download import Download


def test_rate_and_rest() -> None:
    now = [0.0]
    download = Download("tiny/model", lambda: now[0])
    assert (download.rate, download.rest_s) == (None, None)
    for second in range(21):
        now[0] = float(second)
        download.report(second * (100 if second < 10 else 50) + (0 if second < 10 else 500), 2000)
    assert download.rate == pytest.approx(50)  # of the last seconds, not of all
    assert download.rest_s == pytest.approx((2000 - 1500) / 50)
    now[0] = 25.0  # nothing has come since
    assert download.rate is not None
    assert download.rate < 30
    download.report(10, 2000)  # the source has begun again
    assert download.rate is None
    download.stop()
    with pytest.raises(DownloadStoppedError, match="tiny/model"):
        download.report(20, 2000)


def test_a_fault_of_a_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(hub, "pull", broken)
    download = Download("tiny/model")
    download.start()
    assert download.ended.wait(30)
    assert str(download.error) == "the download of tiny/model failed: boom; try again"


@dataclass
class Room:
    needed_bytes: int
    available_bytes: int = 100

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def test_suggestions_fit_and_those_here_come_first(fake_hub: Any) -> None:
    hub.resolve(fake_hub.REPO)  # no model of the catalogue: nothing is known of it

    def fit(status: hub.ModelStatus) -> Room:
        return Room({**sizes, "smollm2-1.7b": 90}.get(status.name, 101))

    sizes = dict.fromkeys(("smollm2-135m", "smollm2-360m", "qwen3-0.6b"), 10)

    found = listing.suggestions(fit=fit)
    assert {each.name for each in found} == {"smollm2-135m", "smollm2-360m", "smollm2-1.7b", "qwen3-0.6b"}
    assert [each.name for each in found if each.tight] == ["smollm2-1.7b"]
    assert len(listing.suggestions(3, fit)) == 3
    assert [each.name for each in listing.suggestions(fit=lambda _: Room(999))] == ["smollm2-135m"]


def test_what_is_here_is_suggested_first(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = hub.list_models()
    here = [
        hub.ModelStatus(
            name=each.name,
            card=each.card,
            path=Path("/") if each.name == "qwen3-0.6b" else None,
            size=7 if each.name == "qwen3-0.6b" else None,
            revision="",
            source=each.source,
        )
        for each in status
    ]
    monkeypatch.setattr(hub, "list_models", lambda: here)
    assert listing.suggestions(fit=lambda _: Room(1))[0].name == "qwen3-0.6b"


def test_columns_give_way_in_order() -> None:
    rows = [
        [("漢字" * 4, ""), ("12 MB", ""), ("words [/x]", "")],
        [("a\x1b[1m\nb", ""), ("1 B", ""), ("", "")],
    ]
    wide = finder.table(rows, 60, elastic=0, drop=(2,))
    assert str(wide[0]) == "漢字漢字漢字漢字  12 MB  words [/x]"
    assert str(wide[1]).split() == ["a[1m", "b", "1", "B"]
    narrow = finder.table(rows, 15, elastic=0, drop=(2,))
    assert [line.cell_length for line in narrow] == [15, 15]
    assert str(narrow[0]).endswith("  12 MB")
    assert finder.table([], 15, elastic=0) == []


def test_sizes_and_times() -> None:
    assert [finder.size(n) for n in (5, 1000, 2_500_000, 3_210_000_000)] == [
        "5 B",
        "1.0 kB",
        "2.5 MB",
        "3.2 GB",
    ]
    assert [finder.countdown(s) for s in (4.6, 245, 3845)] == ["0:05", "4:05", "1:04:05"]
