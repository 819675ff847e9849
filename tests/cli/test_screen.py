"""What is fetched before a chat opens on the screen, what ends it there, and what waits for the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import catalog, hub
from ferrum_mlx.catalog import HubSource
from ferrum_mlx.chat.settings import settings_file
from ferrum_mlx.cli.screen import prepare_chat, pull_if_missing
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, ModelNotFoundError
from ferrum_tui.pseudo_terminal import PseudoTerminal

REPO = "tiny/model"


def config(model: str = "", **more: Any) -> EngineConfig:
    return EngineConfig(model=model, backend="mlx", **more)


@pytest.fixture
def tiny_default(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is the one of the hub on this machine."""
    card = catalog.Card(
        alias="tiny",
        title="Tiny",
        licence="MIT",
        family="llama",
        context=64,
        sources=(HubSource(repo=REPO),),
        default=True,
    )
    monkeypatch.setattr(catalog, "cards", lambda: {"tiny": card})
    monkeypatch.setattr(hub, "cards", lambda: {"tiny": card})


def test_the_default_and_what_the_command_line_names_are_fetched(tiny_default: None, fake_hub: Any) -> None:
    assert prepare_chat(config(), named=False) == []
    assert hub.info("").path is not None
    hub.remove("")
    assert prepare_chat(config(REPO), named=True) == []
    assert hub.info(REPO).path is not None


def test_what_only_the_settings_file_names_is_not_fetched(fake_hub: Any) -> None:
    assert prepare_chat(config(REPO), named=False) == []
    assert fake_hub.requests == []
    pull_if_missing(config(REPO))  # --plain, which has no way to ask
    assert fake_hub.requests


@pytest.mark.parametrize("name", ["qwen3-06b", "./no.gguf", "tiny/absent"])
def test_a_name_on_the_command_line_that_stands_for_none_is_an_error(name: str, fake_hub: Any) -> None:
    with pytest.raises(ModelNotFoundError):
        prepare_chat(config(name), named=True)
    assert prepare_chat(config(name), named=False) == []


def test_a_download_that_fails_is_a_note(tiny_default: None, fake_hub: Any) -> None:
    fake_hub.served["model.safetensors"] = b"x" * len(fake_hub.files["model.safetensors"])
    (note,) = prepare_chat(config(), named=False)
    assert "arrived altered" in note
    assert prepare_chat(config(REPO), named=True) == [note]
    with pytest.raises(FerrumError, match="arrived altered"):
        pull_if_missing(config())


def test_offline_nothing_is_fetched(tiny_default: None, fake_hub: Any) -> None:
    assert prepare_chat(config(offline=True), named=False) == []
    assert prepare_chat(config(REPO, offline=True), named=True) == []
    assert fake_hub.requests == []
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        pull_if_missing(config(REPO, offline=True))


def test_a_draft_model_is_fetched_with_the_model(tmp_path: Path, fake_hub: Any) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    pull_if_missing(config(str(tmp_path / "own.gguf"), speculative=f"draft:{REPO}"))
    assert hub.info(REPO).path is not None


def chat(*args: str) -> PseudoTerminal:
    command = [sys.executable, "-m", "ferrum_mlx", "chat", "--backend", "mlx", *args]
    return PseudoTerminal(command, dict(os.environ), columns=100, rows=30)


def test_without_its_model_the_chat_opens_and_says_so(private_cache: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text('model = "qwen3-0.6b"\n')
    with chat("--offline") as terminal:
        terminal.wait_for("the model 'qwen3-0.6b'")
        terminal.wait_for("Ctrl+O shows")
        terminal.send("\x0f")  # Ctrl+O
        terminal.wait_for("smollm2-360m")
        terminal.send("\x11")
        assert terminal.end() == 0


def test_a_typo_on_the_command_line_ends_before_the_screen(private_cache: Path) -> None:
    with chat("qwen3-06b") as terminal:
        assert terminal.end() == 1
    assert "did you mean qwen3-0.6b?" in terminal.output
    assert "\x1b[?1049h" not in terminal.output  # the other screen of a terminal
