"""The rounds of the CPU bench: all systems in each, an order that turns, ratios within a round."""

from __future__ import annotations

import pytest

from ferrum_mlx.bench.torch_cpu import PACKED, THEIRS, WIDE, measure, report


def test_the_order_turns_and_a_warm_up_goes_before() -> None:
    seen: list[tuple[str, int]] = []

    def system(name: str, speed: float) -> object:
        def run(seed: int) -> float:
            seen.append((name, seed))
            return speed

        return run

    lines: list[str] = []
    systems = {name: system(name, speed) for name, speed in ((THEIRS, 10), (WIDE, 12), (PACKED, 30))}
    found = measure(systems, 2, lines.append)  # type: ignore[arg-type]
    assert seen[:3] == [(THEIRS, -1), (WIDE, -1), (PACKED, -1)]
    assert seen[3:] == [(THEIRS, 0), (WIDE, 0), (PACKED, 0), (WIDE, 1), (PACKED, 1), (THEIRS, 1)]
    assert found == [{THEIRS: 10, WIDE: 12, PACKED: 30}] * 2
    assert lines[0] == (
        "round 1: transformers float32 10.0 tok/s, ours float32 12.0 tok/s, ours packed 30.0 tok/s"
    )


def test_ratios_are_taken_within_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [{THEIRS: 10.0, WIDE: 12.0, PACKED: 30.0}, {THEIRS: 100.0, WIDE: 100.0, PACKED: 200.0}]
    report("one", runs)
    assert capsys.readouterr().out.splitlines() == [
        "one: ours float32 ÷ transformers float32: 1.10 (1.00 to 1.20); met: at least 1.1",
        "one: ours packed ÷ transformers float32: 2.50 (2.00 to 3.00); met: at least 2.5",
    ]
    report("one", runs[1:])
    assert "1.00 (1.00 to 1.00); MISSED: at least 1.1" in capsys.readouterr().out
