"""LoRA adapters on the screen: chosen, shown, counted."""

from __future__ import annotations

from typing import Any

from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.metrics import LoraMetrics
from ferrum_tui.app import ChatApp
from ferrum_tui.engine.panel import panel_lines

from .conftest import GREEDY
from .driver import answers, ready, screen, type_in, until
from .engine_readings import USAGE, Client
from .test_engine_panel import feed_of, plain


async def test_an_adapter_is_chosen_and_shown(stage: Any) -> None:
    config = EngineConfig(backend="fake", adapters=(("poet", "."), ("clerk", ".")))
    app = ChatApp(config, GREEDY, make_client=EngineClient.in_thread, adapter="poet")
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        await ready(pilot)
        await until(pilot, lambda: "adapter poet" in screen(app))
        for text, shown in (("/adapter clerk", "adapter clerk"), ("/adapter", "the adapter is clerk")):
            await type_in(pilot, text)
            await pilot.press("enter")
            await until(pilot, lambda shown=shown: shown in screen(app))  # type: ignore[misc]
        await pilot.press("a", "enter")
        await until(pilot, lambda: answers(pilot) == ["ok"])
        request = app.host.client.totals().last_request
        assert request is not None
        assert request.adapter == "clerk"


async def test_the_panel_counts_them_where_there_are_any() -> None:
    client = Client()
    client.work(kv=USAGE)
    assert not any("LORA" in line for line in plain(panel_lines(await feed_of(client), 44)))
    client.work(kv=USAGE, lora=LoraMetrics(True, 2, {"poet": 2, "clerk": 0}))
    assert "LORA    poet 2  clerk 0" in plain(panel_lines(await feed_of(client), 44))
