"""Copying by the machine's own tools, else by the terminal; what the user is told of it is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.app import App

from ferrum_tui import clipboard
from ferrum_tui.clipboard import copy

TEXT = "größer\n[/x] list[int] $foo\n"
SENT = f"{len(TEXT)} characters sent to the terminal; whether it took them cannot be known."


class Machine:
    """Programs that are in the PATH, and what was given to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.got = folder / "got"

    def has(self, tool: str, script: str = "") -> None:
        file = self.folder / tool
        file.write_text(
            f'#!/bin/sh\n{script or f"""/bin/cat > "{self.got}"; echo {tool} "$@" > "{self.got}.by" """}\n'
        )
        file.chmod(0o755)

    @property
    def used(self) -> str:
        return (self.folder / "got.by").read_text().strip()


class Screen(App[None]):
    """Records what is sent to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def copy_to_clipboard(self, text: str) -> None:
        self.sent.append(text)
        super().copy_to_clipboard(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SSH_TTY", "SSH_CONNECTION", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("tool", "needs", "encoding"),
    [
        ("pbcopy", "", "utf-8"),
        ("wl-copy", "WAYLAND_DISPLAY", "utf-8"),
        ("xclip -selection clipboard -in", "DISPLAY", "utf-8"),
        ("xsel --clipboard --input", "DISPLAY", "utf-8"),
        ("clip.exe", "", "utf-16-le"),
    ],
)
async def test_a_tool_gets_the_exact_text(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tool: str, needs: str, encoding: str
) -> None:
    machine.has(tool.split()[0])
    app = Screen()
    if needs:
        assert await copy(app, TEXT) == SENT  # there is no display that it could use
        monkeypatch.setenv(needs, ":0")
        app = Screen()
    assert await copy(app, TEXT) == f"Copied {len(TEXT)} characters."
    assert machine.got.read_bytes().decode(encoding) == TEXT
    assert machine.used == tool
    assert app.clipboard == TEXT
    assert not app.sent


async def test_numbers_are_for_people(machine: Machine) -> None:
    machine.has("pbcopy")
    assert await copy(Screen(), "x" * 1204) == "Copied 1,204 characters."
    assert await copy(Screen(), "x") == "Copied 1 character."


@pytest.mark.parametrize("variable", ["SSH_TTY", "SSH_CONNECTION"])
async def test_over_ssh_the_terminal_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    machine.has("pbcopy")
    monkeypatch.setenv(variable, "1")
    app = Screen()
    assert await copy(app, TEXT) == SENT
    assert app.sent == [TEXT]
    assert app.clipboard == TEXT
    assert not machine.got.exists()


async def test_without_a_tool_the_terminal_is_asked(machine: Machine) -> None:
    app = Screen()
    assert await copy(app, TEXT) == SENT
    assert app.sent == [TEXT]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'no [/display]\x1b[31m' >&2; exit 1", "pbcopy failed: no [/display][31m; "),
        ("exit 3", "pbcopy failed: exit code 3; "),
    ],
)
async def test_a_tool_that_fails_is_quoted_and_the_terminal_asked(
    machine: Machine, script: str, told: str
) -> None:
    machine.has("pbcopy", script)
    app = Screen()
    assert await copy(app, TEXT) == told + SENT
    assert app.sent == [TEXT]
    assert app.clipboard == TEXT


async def test_the_next_tool_is_tried(machine: Machine) -> None:
    machine.has("pbcopy", "exit 1")
    machine.has("clip.exe")
    assert await copy(Screen(), TEXT) == f"Copied {len(TEXT)} characters."
    assert machine.used == "clip.exe"


async def test_a_file_that_is_no_program(machine: Machine) -> None:
    machine.has("pbcopy")
    (machine.folder / "pbcopy").write_bytes(b"\x7fELFnothing")
    assert (await copy(Screen(), TEXT)).startswith("pbcopy failed: ")


async def test_a_tool_that_hangs_is_ended(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipboard, "_PATIENCE", 0.2)
    machine.has("pbcopy", "exec /bin/sleep 60")
    app = Screen()
    assert await copy(app, "x" * 1_000_000) == (
        "pbcopy did not answer within 0 s; 1,000,000 characters sent to the terminal; "
        "whether it took them cannot be known."
    )


async def test_a_tool_that_leaves_a_process_behind_is_not_waited_for(machine: Machine) -> None:
    """As xclip does, which serves the clipboard from then on."""
    machine.has("pbcopy", f"/bin/cat > '{machine.got}'; /bin/sleep 5 & exit 0")
    assert await copy(Screen(), TEXT) == f"Copied {len(TEXT)} characters."
