"""The arithmetic of the bench, and that it compares nothing unlike."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ferrum_mlx.bench import stock


def test_the_first_token_is_prefill_and_the_others_decode() -> None:
    figures = stock.figures_of(10.0, [12.0, 12.5, 13.0, 14.0])
    assert figures == {"ttft_s": 2.0, "decode_tps": 1.5}


def runs(monkeypatch: pytest.MonkeyPatch, ids: dict[str, list[int]]) -> tuple[list[str], object]:
    order: list[str] = []

    def run(side: str, tokens: int, prompt_tokens: int) -> dict[str, object]:
        order.append(side)
        speed = {"ferrum": 20.0, "mlx-lm": 8.0}[side]
        return {"ttft_s": 10 / speed, "decode_tps": speed, "ids": ids[side]}

    monkeypatch.setattr(stock, "_run", run)
    return order, CliRunner().invoke(stock.main, ["--pairs", "3"])


def test_ratios_and_an_order_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    order, result = runs(monkeypatch, {"ferrum": [1, 2], "mlx-lm": [1, 2]})
    assert order == ["ferrum", "mlx-lm", "mlx-lm", "ferrum", "ferrum", "mlx-lm"]
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == {"decode_ratio": [2.5] * 3, "ttft_ratio": [2.5] * 3}


def test_different_ids_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = runs(monkeypatch, {"ferrum": [1, 2], "mlx-lm": [1, 3]})
    assert result.exit_code == 1
    assert "different token ids" in result.output
