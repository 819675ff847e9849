"""Who is measured beside this engine: found by name, or named as absent with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ferrum_mlx import hub
from ferrum_mlx.bench.systems import PeerAbsentError, System
from ferrum_mlx.bench.workloads import Case
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError, one_line
from ferrum_mlx.verify.runs import Subject


@dataclass(frozen=True, slots=True)
class Setting:
    """What a peer is built from: our engine, the settings, and what it will be asked."""

    subject: Subject
    config: EngineConfig
    cases: Sequence[Case]

    @property
    def backend(self) -> str:
        return self.subject.engine.ready().backend

    @property
    def longest(self) -> int:
        return max(case.longest for case in self.cases)

    @property
    def streams(self) -> int:
        return max(case.streams for case in self.cases) + 1  # the one that intrudes

    def resolved(self) -> hub.ResolvedModel:
        """The model's files.

        Raises:
            PeerAbsentError: there are none.
        """
        if self.backend == "fake":
            raise PeerAbsentError("the fake backend has no weights to give it")
        return hub.resolve(self.config.model, offline=True, progress=False)


def _mlx_lm(setting: Setting) -> System:
    _need("mlx_lm", "pip install 'ferrum-mlx'")
    from ferrum_mlx.bench.peers_mlx import mlx_lm_peer

    return mlx_lm_peer(setting)


def _transformers(setting: Setting) -> System:
    _need("torch", "pip install 'ferrum-mlx[torch]'")
    from ferrum_mlx.bench.peers_torch import transformers_peer

    return transformers_peer(setting)


def _llama_cpp(setting: Setting) -> System:
    from ferrum_mlx.bench.peers_llama import llama_peer

    return llama_peer(setting)


PEERS: dict[str, Callable[[Setting], System]] = {
    "mlx-lm": _mlx_lm,
    "transformers": _transformers,
    "llama.cpp": _llama_cpp,
}


def check_names(names: Sequence[str]) -> None:
    """Refuse what is no peer, before anything is loaded."""
    for name in names:
        if name not in PEERS and not _is_url(name):
            known = ", ".join(PEERS)
            raise UsageError(f"--vs {name!r}", f"allowed: {known}, or the URL of an OpenAI-compatible server")


def find(name: str, setting: Setting) -> System:
    """A peer that is ready to run.

    Raises:
        PeerAbsentError: it isn't here, or cannot run here.
    """
    try:
        return _remote(name, setting) if _is_url(name) else PEERS[name](setting)
    except PeerAbsentError:
        raise
    except Exception as error:  # a library that is broken, or has no class for the model
        raise PeerAbsentError(f"it cannot be set up: {one_line(error)}") from error


def _remote(url: str, setting: Setting) -> System:
    from ferrum_mlx.bench.peers_url import Remote

    remote = Remote(url, url, setting.subject.codec)
    remote.find_model()
    return remote


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _need(package: str, install: str) -> None:
    if find_spec(package) is None:
        raise PeerAbsentError(f"the package {package.replace('_', '-')} is not installed", next_step=install)
