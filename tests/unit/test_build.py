"""Which backend is taken, and what is said of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import build
from ferrum_mlx.build import build_engine, choose_backend
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import BackendUnavailableError

BOTH = ("mlx", "torch")


@pytest.mark.parametrize(
    ("installed", "system", "machine", "nvidia", "chosen", "why"),
    [
        (BOTH, "Darwin", "arm64", False, "mlx", "Apple silicon"),
        (("torch",), "Darwin", "arm64", False, "torch", "mlx is not installed"),
        (BOTH, "Linux", "x86_64", True, "torch", "NVIDIA GPU"),
        (BOTH, "Linux", "x86_64", False, "torch", "no Apple or NVIDIA GPU; torch packs weights"),
        (("mlx",), "Linux", "x86_64", False, "mlx", "torch, which packs weights for CPUs, is not installed"),
        (("torch",), "Linux", "aarch64", False, "torch", "torch packs weights"),
    ],
)
def test_auto(
    installed: tuple[str, ...],
    system: str,
    machine: str,
    nvidia: bool,
    chosen: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(build.platform, "system", lambda: system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "NVIDIA_DRIVER", Path("/" if nvidia else "/no/such/file"))
    backend, reason = choose_backend("auto")
    assert backend == chosen
    assert why in reason
    for name in installed:
        assert choose_backend(name) == (name, "asked for by --backend")


@pytest.mark.parametrize("wanted", ["mlx", "torch", "auto"])
def test_an_absent_library_gives_one_line_with_the_command(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError) as caught:
        choose_backend(wanted)
    message = str(caught.value)
    assert "installed" in message
    assert ("pip install 'ferrum-mlx[torch]'" in message) is (wanted != "mlx")
    assert "\n" not in message


def test_a_broken_library_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import ferrum_mlx.backends.torch as package

    monkeypatch.delattr(package, "build", raising=False)
    monkeypatch.setitem(sys.modules, "ferrum_mlx.backends.torch.build", None)  # its import then fails
    with pytest.raises(BackendUnavailableError, match="torch cannot be loaded"):
        build._backend("torch")


def test_engines_of_a_process_load_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    original, inside, most, told = build._load, 0, 0, []
    first_is_in, second_waits = threading.Event(), threading.Event()

    def load(*given: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        first_is_in.set()
        assert second_waits.wait(30)
        inside -= 1
        return original(*given)

    def narrate(what: str) -> None:
        told.append(what)
        second_waits.set()

    monkeypatch.setattr(build, "_load", load)
    config = EngineConfig(backend="fake")
    first = threading.Thread(target=build_engine, args=(config,))
    first.start()
    assert first_is_in.wait(30)
    build_engine(config, narrate)
    first.join(30)
    assert (most, inside, told) == (1, 0, ["waiting for another engine of this process to load"])
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setattr(build, "_load", original)
    with pytest.raises(BackendUnavailableError):  # and a load that fails keeps nobody waiting
        build_engine(EngineConfig(backend="torch"))
    assert not build._LOADING.locked()
