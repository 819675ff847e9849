"""MLX on the CPU without its run-time compiler, and the zoo's table at the end of the report."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

EXACT = "exact"


@pytest.fixture(autouse=True, scope="session")
def _plain_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()


@pytest.fixture
def zoo_table(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Name of a tiny model → what became of it in this test."""
    outcomes: dict[str, str] = {}
    yield outcomes
    request.node.user_properties += [("zoo", [name, outcome]) for name, outcome in outcomes.items()]


@pytest.fixture
def pair_table(request: pytest.FixtureRequest) -> Iterator[dict[frozenset[str], str]]:
    """Two features, or one alone → what became of them together."""
    outcomes: dict[frozenset[str], str] = {}
    yield outcomes
    request.node.user_properties += [("pair", [*sorted(pair), out]) for pair, out in outcomes.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Out of the reports, which come from other processes too; of several outcomes the worst counts."""
    pairs: dict[frozenset[str], str] = {}
    zoo: dict[str, str] = {}
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        for kind, (*names, outcome) in getattr(report, "user_properties", ()):
            if kind == "pair" and pairs.get(frozenset(names), EXACT) == EXACT:
                pairs[frozenset(names)] = outcome
            elif kind == "zoo" and zoo.get(names[0], EXACT) == EXACT:
                zoo[names[0]] = outcome
    if pairs:
        _show_pairs(terminalreporter, pairs)
    if zoo:
        _show_zoo(terminalreporter, zoo)


def _show_pairs(terminalreporter: pytest.TerminalReporter, table: dict[frozenset[str], str]) -> None:
    names = list(dict.fromkeys(name for pair in sorted(table, key=len) for name in sorted(pair)))
    exact = sum(outcome == EXACT for outcome in table.values())
    terminalreporter.section(f"pairs of features: {exact} exact, {len(table) - exact} not")
    for i, name in enumerate(names):
        cells = [_cell(table.get(frozenset({name, other}), "")) for other in names[: i + 1]]
        terminalreporter.write_line(f"{i + 1:3} {name:22} {' '.join(cells)}")
    terminalreporter.write_line(" " * 27 + " ".join(f"{i + 1:2}" for i in range(len(names))))
    for pair, outcome in table.items():
        if outcome != EXACT:
            terminalreporter.write_line(f"{' + '.join(sorted(pair))}: {outcome}")


def _cell(outcome: str) -> str:
    return {"exact": " =", "differs": " X", "": "  "}.get(outcome, " -")


def _show_zoo(terminalreporter: pytest.TerminalReporter, table: dict[str, str]) -> None:
    exact = sum(outcome == EXACT for outcome in table.values())
    terminalreporter.section(f"mlx-lm model types: {exact} exact, {len(table) - exact} not")
    for name, outcome in sorted(table.items(), key=lambda row: (row[1] != EXACT, row[0].lower())):
        terminalreporter.write_line(f"{name:20} {outcome}")
