"""What the panel, the strip and the full screen say of known readings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

import ferrum_tui
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.metrics import SpeculationStats
from ferrum_tui.engine.feed import EngineFeed
from ferrum_tui.engine.panel import EnginePanel, panel_lines
from ferrum_tui.engine.readings import Readings
from ferrum_tui.engine.screen import EngineScreen, screen_lines
from ferrum_tui.engine.strip import EngineStrip, strip_lines

from .driver import screen, until
from .engine_readings import Client, busy, ready

STYLES = Path(ferrum_tui.__file__).parent / "css" / "engine.tcss"
SIZES = [(120, 36), (80, 24), (40, 12)]


class PanelApp(App[None]):
    CSS_PATH = STYLES
    CSS = "#chat { width: 1fr; }"

    def __init__(self, feed: EngineFeed) -> None:
        super().__init__()
        self.animation_level = "none"
        self.feed = feed

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static("chat", id="chat")
            yield EnginePanel(self.feed)
        yield EngineStrip(self.feed)


async def feed_of(client: Client, seconds: float = 0.0) -> EngineFeed:
    """After so long at 50 tokens a second, in steps of a quarter of one."""
    now = 0.0
    feed = EngineFeed(client, lambda: now)  # type: ignore[arg-type]
    await feed.refresh()
    for i in range(int(seconds * 4)):
        now += 0.25
        client.work(12 + i % 2, speculation=client.last_step.speculation if client.last_step else None)
        await feed.refresh()
    return feed


def plain(lines: list) -> list[str]:  # type: ignore[type-arg]
    return [line.plain.rstrip() for line in lines]


async def test_panel_of_known_readings() -> None:
    feed = await feed_of(busy(), 90)
    assert plain(panel_lines(feed, 44)) == [
        "NOW     tok/s   50.0   avg 50.0",
        "   60┤" + "▄" * 38,
        "     │" + "█" * 38,
        "     │" + "█" * 38,
        "    0┴ last 60 s",
        "TTFT    last 412 ms  p50 412  p99 1,204",
        "ITL     p50 20.3 ms  p99 31.8  max 74.0",
        "PREFILL 1,842 tok/s  #18 62% ▰▰▰▱▱",
        "",
        "KV POOL 100 blk × 16 tok   40% in use",
        "█" * 30 + "▓" * 10 + "░" * 4,
        "░" * 16 + "·" * 28,
        "·" * 12,
        "█ used 30  ▓ shared 10×2.2  cell=1 blk",
        "░ cached 20  · free 40",
        "PREFIX  hit 71% tok  (4,362/6,144 reused)",
        "SPEC    accept 2.6/4.0  α 0.65  ngram",
        "MEMORY  weights  4.6 GB",
        "        KV pool  3.4 GB  (1.4 GB in use)",
        "        ━━━━━━━━━━━━━━━━━━─── 84% of 10.0 GB",
        "QUEUE   run 2  wait 1  preempt 0",
        "17       ● decode     214t  48.7/s  6.2k",
        "18       ◐ prefill     62%  1.8k/s  1.9k",
        "19       ▽ preempted     –             0 ▽1",
        "         … 5 more",
        "OFF     paged kernel: no GPU [x]",
    ]


async def test_strip_of_known_readings() -> None:
    feed = await feed_of(busy(), 90)
    assert plain(strip_lines(feed, 78)) == [
        "   60┤" + "▇" * 16 + " 50.0 tok/s  TTFT 412 ms  ITL 20.3 ms  hit 71%  spec 65%",
        "KV " + "█" * 6 + "▓▓" + "░" * 4 + "·" * 8 + " 40% of 100 blk  run 2 wait 1  mem 84%",
    ]


async def test_full_screen_has_the_table_the_minute_and_the_facts() -> None:
    text = "\n".join(plain(screen_lines(await feed_of(busy(), 90), 116)))
    assert "17       ● decode     214t  48.7    4.8 s   412 ms    6,000   4,096   214     0" in text
    assert "19       ▽ preempted  –     –       4.8 s   –         3,000   0       0       1" in text
    assert "… 5 more" in text
    assert text.count("last 60 s") == 3
    assert "Qwen3-8B" in text
    assert "NOTES   the context is shorter" in text
    assert "OFF     paged kernel: no GPU [x]" in text


async def test_before_anything_has_happened() -> None:
    feed = await feed_of(Client())
    lines = plain(panel_lines(feed, 44))
    assert lines[0] == "NOW     tok/s    0.0   avg 0.0"
    assert "TTFT    no token yet" in lines
    assert "ITL     no gap yet" in lines
    assert "PREFILL – tok/s" in lines
    assert "PREFIX  no prompt yet" in lines
    assert "SPEC    no guess yet  ngram" in lines
    assert "░ cached 0  · free 100" in lines
    assert lines[-2] == "QUEUE   run 0  wait 0  preempt 0"


async def test_why_nothing_is_guessed() -> None:
    client = busy()
    stats = SpeculationStats(name="ngram", drafted=4, accepted=0, verifies=1, why="guesses cost more [0]")
    client.work(1, speculation=stats)
    lines = plain(panel_lines(await feed_of(client), 60))
    assert "        no guesses: guesses cost more [0]" in lines
    client.ready = ready(speculation="")
    client.config = EngineConfig(backend="fake")
    assert "SPEC    off (--speculative)" in plain(panel_lines(await feed_of(client), 60))


async def test_quantized_kv_has_its_name() -> None:
    client = busy()
    client.ready = ready(info=replace(ready().info, kv_dtype="int8"))
    lines = plain(panel_lines(await feed_of(client), 44))
    assert "        KV int8  3.4 GB  (1.4 GB in use)" in lines
    assert not any("KV pool" in line for line in lines)


async def test_a_limit_nobody_knows_is_not_made_up() -> None:
    client = busy()
    client.ready = ready(memory_limit_bytes=0)
    lines = plain(panel_lines(await feed_of(client), 44))
    assert "        held     8.4 GB, peak 8.5 GB" in lines
    assert not any("━" in line for line in lines)


async def test_words_of_others_cannot_move_the_cursor() -> None:
    client = busy()
    request = replace(client.answer.requests[0], request_id="\x1b[2J[red]a\nb")
    client.answer = replace(client.answer, requests=(request,))
    client.ready = ready(notes=("\x1b]0;t\x07[/x]",))
    feed = await feed_of(client)
    text = "".join(plain([*panel_lines(feed, 44), *screen_lines(feed, 80)]))
    assert "\x1b" not in text
    assert "[2J[red…" in text
    async with PanelApp(feed).run_test(size=(120, 36)) as pilot:
        await pilot.app.push_screen(EngineScreen(feed))
        await pilot.pause()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lines", [panel_lines, strip_lines, screen_lines])
async def test_nothing_is_wider_than_the_screen(size: tuple[int, int], lines: object) -> None:
    feed = await feed_of(busy(), 10)

    class OneApp(App[None]):
        CSS_PATH = STYLES

        def compose(self) -> ComposeResult:
            yield Readings(feed, lines)  # type: ignore[arg-type]

    async with OneApp().run_test(size=size) as pilot:
        shown = pilot.app.query_one(Readings)
        await until(pilot, lambda: shown.size.height == len(str(shown.content).split("\n")) > 1)
        assert all(len(line) <= size[0] for line in str(shown.content).splitlines())


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "ansi-dark", "ansi-light", "NO_COLOR"])
async def test_the_glyphs_are_the_same_in_every_theme(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if theme == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    feed = await feed_of(busy(), 10)
    app = PanelApp(feed)
    async with app.run_test(size=(120, 36)) as pilot:
        if theme != "NO_COLOR":
            app.theme = theme
        await pilot.pause()
        text = screen(app)
        assert "█" * 30 + "▓" * 10 + "░░░░" in text
        assert "▽ preempted" in text


@pytest.mark.parametrize("size", SIZES)
async def test_full_screen_opens_scrolls_and_closes(size: tuple[int, int]) -> None:
    feed = await feed_of(busy(), 10)
    app = PanelApp(feed)
    async with app.run_test(size=size) as pilot:
        for key in ("escape", "ctrl+b", "q"):
            await app.push_screen(EngineScreen(feed))
            await pilot.pause()
            assert "NOW" in screen(app)
            await pilot.press("end")
            await until(pilot, lambda: "NOTES" in screen(app))
            await pilot.press(key)
            assert len(app.screen_stack) == 1


async def test_a_change_is_drawn_and_nothing_else_is() -> None:
    client = busy()
    feed = await feed_of(client)
    app = PanelApp(feed)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        assert "run 2  wait 1" in screen(app)
        drawn: list[str] = []
        for shown in app.query(Readings):
            shown.update = lambda *_, **__: drawn.append("again")  # type: ignore[method-assign, assignment]
        await feed.refresh()
        feed._tell()
        await pilot.pause()
        assert drawn == []
        client.work(5, running=7)
        await feed.refresh()
        assert drawn == ["again", "again"]


async def test_closed_widgets_are_told_no_more() -> None:
    feed = await feed_of(busy())
    async with PanelApp(feed).run_test():
        assert len(feed._watchers) == 2
    assert feed._watchers == []
