"""MLX on the CPU without its run-time compiler, and the zoo's table at the end of the report."""

from __future__ import annotations

import mlx.core as mx
import pytest

TABLE = pytest.StashKey[dict[str, str]]()
PAIRS = pytest.StashKey[dict[frozenset[str], str]]()


@pytest.fixture(autouse=True, scope="session")
def _plain_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = {}
    config.stash[PAIRS] = {}


@pytest.fixture
def zoo_table(request: pytest.FixtureRequest) -> dict[str, str]:
    """Name of a tiny model → what became of it."""
    return request.config.stash[TABLE]


@pytest.fixture
def pair_table(request: pytest.FixtureRequest) -> dict[frozenset[str], str]:
    """Two features, or one alone → what became of them together."""
    return request.config.stash[PAIRS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[PAIRS]:
        _show_pairs(terminalreporter, config.stash[PAIRS])
    if config.stash[TABLE]:
        _show_zoo(terminalreporter, config.stash[TABLE])


def _show_pairs(terminalreporter: pytest.TerminalReporter, table: dict[frozenset[str], str]) -> None:
    names = list(dict.fromkeys(name for pair in table for name in sorted(pair)))
    exact = sum(outcome == "exact" for outcome in table.values())
    terminalreporter.section(f"pairs of features: {exact} exact, {len(table) - exact} not")
    for i, name in enumerate(names):
        cells = [_cell(table.get(frozenset({name, other}), "")) for other in names[: i + 1]]
        terminalreporter.write_line(f"{i + 1:3} {name:22} {' '.join(cells)}")
    terminalreporter.write_line(" " * 27 + " ".join(f"{i + 1:2}" for i in range(len(names))))
    for pair, outcome in table.items():
        if outcome != "exact":
            terminalreporter.write_line(f"{' + '.join(sorted(pair))}: {outcome}")


def _cell(outcome: str) -> str:
    return {"exact": " =", "differs": " X", "": "  "}.get(outcome, " -")


def _show_zoo(terminalreporter: pytest.TerminalReporter, table: dict[str, str]) -> None:
    exact = sum(outcome == "exact" for outcome in table.values())
    terminalreporter.section(f"mlx-lm model types: {exact} exact, {len(table) - exact} not")
    for name, outcome in sorted(table.items(), key=lambda row: (row[1] != "exact", row[0].lower())):
        terminalreporter.write_line(f"{name:20} {outcome}")
