"""What a download says of itself, and which models a first run suggests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.app import App

from ferrum_mlx import catalog, hub
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import DownloadStoppedError
from ferrum_mlx.fit import Fit
from ferrum_tui.notices import Welcome
from ferrum_tui.screens import finder, listing
from ferrum_tui.screens.download import Download

from .driver import screen, until


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


def room(needed: int, free: int = 100) -> Fit:
    return Fit(needed, free, needed <= free, "")


def test_suggestions_fit_and_those_here_come_first(fake_hub: Any) -> None:
    hub.resolve(fake_hub.REPO)  # no model of the catalogue: nothing is known of it

    def fit(status: hub.ModelStatus) -> Fit:
        return room({**sizes, "smollm2-1.7b": 90}.get(status.name, 101))

    sizes = dict.fromkeys(("smollm2-135m", "smollm2-360m", "qwen3-0.6b"), 10)

    found = listing.suggestions(fit=fit)
    assert {each.name for each in found} == {"smollm2-135m", "smollm2-360m", "smollm2-1.7b", "qwen3-0.6b"}
    assert [each.name for each in found if each.fit and each.fit.tight] == ["smollm2-1.7b"]
    assert len(listing.suggestions(fit=lambda _: room(1))) == 5


def test_three_are_suggested_even_where_fewer_fit(private_cache: Path) -> None:
    def fit(status: hub.ModelStatus) -> Fit | None:
        return {"smollm2-135m": room(99), "qwen3-0.6b": room(200), "gemma-3-1b": room(150)}.get(status.name)

    found = listing.suggestions(fit=fit)
    assert [each.name for each in found] == ["smollm2-135m", "gemma-3-1b", "qwen3-0.6b"]
    assert [listing.fits(each) for each in found] == [True, False, False]
    assert listing.suggestions(fit=lambda _: None)[0].name == "smollm2-135m"
    assert len(listing.suggestions(fit=lambda _: None)) == 3


async def test_what_is_suggested_and_does_not_fit_says_so(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "memory_fit", lambda status, **_: room(10**9, 10**8))
    page = App[None]()
    async with page.run_test(size=(80, 24)) as pilot:
        await page.mount(Welcome("m", EngineConfig(backend="torch")))
        await until(pilot, lambda: screen(page).count("too big: needs 1.0 GB of 100 MB") == 3)


def test_each_backend_has_files_and_a_size_of_its_own(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, where MLX would take its 4 bits and torch cannot."""
    mac = SimpleNamespace(system=lambda: "Darwin", machine=lambda: "arm64")
    monkeypatch.setattr(catalog, "platform", mac)  # not the module itself, which libraries ask at import, too
    whole = catalog.HubSource(repo="maker/eight", size=16_000)
    packed = catalog.HubSource(repo="mlx/eight", variant="mlx-4bit", size=4_500)
    card = replace(catalog.cards()["qwen3-8b"], sources=(whole, packed))
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"qwen3-8b": card})
    asked: list[str] = []

    def fit_of(status: hub.ModelStatus, *, backend: str, kv_bits: int | None) -> None:
        asked.append(backend)

    monkeypatch.setattr(listing, "fit_of", fit_of)
    sizes = {}
    for backend in ("mlx", "torch"):
        fit, named = listing.for_engine(EngineConfig(backend=backend))
        assert named == backend
        (found,) = listing.entries(fit, named)
        sizes[backend] = found.size
        assert set(asked) == {backend}
        asked.clear()
    assert sizes == {"mlx": 4_500, "torch": 16_000}


def test_a_download_is_of_the_files_that_the_backend_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(hub, "pull", lambda model, *, backend, report, say: pulled.append(backend))
    download = Download("qwen3-8b", backend="torch")
    download.start()
    assert download.ended.wait(30)
    assert (pulled, download.error) == (["torch"], None)


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
    monkeypatch.setattr(hub, "list_models", lambda backend="": here)
    assert listing.suggestions(fit=lambda _: room(1))[0].name == "qwen3-0.6b"


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


def test_times() -> None:
    assert [finder.countdown(s) for s in (4.6, 245, 3845)] == ["0:05", "4:05", "1:04:05"]
