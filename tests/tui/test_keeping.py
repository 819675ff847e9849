"""The sessions file while another program holds it: the chat goes on, and nothing is lost."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_tui import keeping
from ferrum_tui.app import ChatApp

from .conversing import SIZE, ask
from .driver import GREEDY, ready, screen, until


@pytest.mark.parametrize("let_go", ["in time", "at the end"])
async def test_what_another_program_keeps_from_being_written_is_written_later(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_go: str
) -> None:
    monkeypatch.setattr(keeping, "_AGAIN", 0.1 if let_go == "in time" else 1000.0)
    path = tmp_path / "sessions.db"
    store = Store(path)
    chat = ChatApp(EngineConfig(backend="fake"), GREEDY, make_client=EngineClient.in_thread, store=store)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        async with chat.run_test(size=SIZE, notifications=True) as pilot:
            await ready(pilot)
            await ask(pilot, "a")
            other.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            await ask(pilot, "b")
            assert time.monotonic() - began < 9  # three writes; each waited ten seconds once
            await until(pilot, lambda: "not kept for now: cannot use the sessions" in screen(chat))
            await pilot.press("ctrl+n")
            await ask(pilot, "c")
            assert [row.messages for row in store.list()] == [2]
            other.execute("ROLLBACK")
            if let_go == "in time":
                await until(pilot, lambda: "all is kept again" in screen(chat))
                assert [row.messages for row in store.list()] == [2, 4]
    with closing(Store(path)) as again:
        kept = [again.load(row.id) for row in again.list()]
        paths = [[message.text for message in each.path(each.leaf)] for each in kept]
        assert sorted(paths) == [["a", "ok", "b", "ok"], ["c", "ok"]]
