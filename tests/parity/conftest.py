"""MLX on the CPU without its run-time compiler, and the zoo's table at the end of the report."""

from __future__ import annotations

import mlx.core as mx
import pytest

TABLE = pytest.StashKey[dict[str, str]]()


@pytest.fixture(autouse=True, scope="session")
def _plain_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = {}


@pytest.fixture
def zoo_table(request: pytest.FixtureRequest) -> dict[str, str]:
    """Name of a tiny model → what became of it."""
    return request.config.stash[TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[TABLE]
    if not table:
        return
    exact = sum(outcome == "exact" for outcome in table.values())
    terminalreporter.section(f"mlx-lm model types: {exact} exact, {len(table) - exact} not")
    for name, outcome in sorted(table.items(), key=lambda row: (row[1] != "exact", row[0].lower())):
        terminalreporter.write_line(f"{name:20} {outcome}")
