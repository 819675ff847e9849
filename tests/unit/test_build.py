"""Which backend is taken, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrum_mlx import build
from ferrum_mlx.build import choose_backend
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
