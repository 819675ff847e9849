"""The screen of a running benchmark: it follows the events, draws at no other time, and ends with them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pickle import UnpicklingError
from typing import Any

import pytest
from textual.containers import VerticalScroll
from textual.pilot import Pilot

from ferrum_mlx.bench.progress import Begun, Event, Said
from ferrum_tui.bench.app import WatchApp
from ferrum_tui.engine.readings import Readings

from .bench_events import TG, Source, halfway, plan
from .driver import screen, until
from .screen_host import LOOKS


def watching(source: Source, theme: str = "") -> WatchApp:
    if theme == "NO_COLOR":
        os.environ[theme], theme = "1", ""  # the app takes it out again
    return WatchApp(source, theme)


async def shows(pilot: Pilot[Any], text: str) -> None:
    await until(pilot, lambda: text in screen(pilot.app))


@pytest.mark.parametrize(("size", "theme"), LOOKS)
async def test_every_size_and_every_kind_of_colours(size: tuple[int, int], theme: str) -> None:
    async with watching(Source(halfway()), theme).run_test(size=size) as pilot:
        for part in ("Tiny [b][31m", "▶ admission × 7, ferrum-mlx", "7 of 10 runs", "✓ ferrum-mlx", "q stop"):
            await shows(pilot, part)
        await pilot.press("end")
        await shows(pilot, "note: a note [x][2J")


async def test_a_run_goes_on_when_the_screen_has_been_drawn_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, log = Source([plan(), Said("a warm-up")]), []
    display = WatchApp._display

    def painted(self: WatchApp, *args: Any) -> None:
        log.append("painted")
        display(self, *args)

    monkeypatch.setattr(WatchApp, "_display", painted)
    monkeypatch.setattr(source, "drawn", lambda begun: log.append(f"{begun.rep} goes on"))
    async with watching(source).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "… a warm-up")
        await pilot.pause(0.2)
        assert not any("goes on" in what for what in log)
        log.clear()
        source.tell(Begun(TG, 1))
        await until(pilot, lambda: "1 goes on" in log)
        assert "painted" in log[: log.index("1 goes on")]
        assert "▶ tg128 × 2, ferrum-mlx" in screen(pilot.app)


async def test_keys_scroll() -> None:
    async with watching(Source(halfway())).run_test(size=(40, 12)) as pilot:
        await shows(pilot, "✓ mlx-lm")
        body = pilot.app.query_one("#results", VerticalScroll)
        places = [body.scroll_y]
        for key in ("down", "pagedown", "up", "pageup"):
            await pilot.press(key)
            places.append(body.scroll_y)
        assert places == [0, 1, 1 + body.size.height, body.size.height, 0]


@pytest.mark.parametrize("key", ["ctrl+c", "ctrl+q"])
async def test_the_first_time_it_may_report_the_second_time_it_ends(key: str) -> None:
    source = Source(halfway())
    async with watching(source).run_test(size=(80, 24)) as pilot:
        await pilot.press(key)
        await shows(pilot, "■ stopping")
        assert source.asked == ["interrupt"]
        await shows(pilot, "q ends it now, without a report")
        await pilot.press(key)
        assert source.asked == ["interrupt", "kill"]
        assert pilot.app.is_running  # up to the end of the events
        source.end()
        await until(pilot, lambda: not pilot.app.is_running)
    assert pilot.app.return_code == 0


async def test_a_sigint_from_elsewhere_is_a_key_like_others() -> None:
    source = Source()
    async with watching(source).run_test() as pilot:
        signal.raise_signal(signal.SIGINT)
        await until(pilot, lambda: source.asked == ["interrupt"])
    with pytest.raises(KeyboardInterrupt):  # and not when the screen has gone
        signal.raise_signal(signal.SIGINT)


async def test_nothing_is_drawn_or_set_to_wake_while_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    source, drawn = Source(halfway()), 0
    update = Readings.update

    def counted(self: Readings[Any], *args: Any, **kwargs: Any) -> None:
        nonlocal drawn
        drawn += 1
        update(self, *args, **kwargs)

    async with watching(source).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "▶ admission × 7")
        monkeypatch.setattr(Readings, "update", counted)
        settled = -1
        while settled != drawn:
            settled = drawn
            await pilot.pause(0.1)
        widgets = [pilot.app, pilot.app.screen, *pilot.app.screen.walk_children()]
        assert [widget for widget in widgets if any(timer._active.is_set() for timer in widget._timers)] == []
        await asyncio.sleep(0.3)
        assert drawn == settled
        source.tell(Said("something"))  # that it would have been counted
        await shows(pilot, "… something")
        assert drawn > settled


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_events_that_break_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()

    def broken() -> Iterator[Event]:
        yield Said("before")
        raise UnpicklingError("broken")

    monkeypatch.setattr(source, "events", broken)
    others = set(threading.enumerate())
    async with watching(source).run_test() as pilot:
        await until(pilot, lambda: not pilot.app.is_running)
    for thread in set(threading.enumerate()) - others:  # what it raises is expected here alone
        if thread.name == "bench-events":
            thread.join()


@pytest.mark.parametrize(("theme", "notes"), [("ferrum-light", 0), ("rust[/0]", 1)])
async def test_a_theme_that_there_is_not_is_a_note_for_later(theme: str, notes: int) -> None:
    app = watching(Source(), theme)
    async with app.run_test():
        assert app.theme == (theme if not notes else "ferrum")
    assert len(app.notes) == notes
    assert all("'rust[/0]', which is no theme; allowed: " in note for note in app.notes)
