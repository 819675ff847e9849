"""Configuration to a running engine: the only place that knows which backends there are."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

from ferrum_mlx import hub, threads  # noqa: F401 - threads before anything loads an array library
from ferrum_mlx.build_speculation import Loaded, build_executors, check_same_vocabulary, pair_of_fakes
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import BackendUnavailableError
from ferrum_mlx.events import EventLog, open_log
from ferrum_mlx.fit import check_context
from ferrum_mlx.output import TextCodec
from ferrum_mlx.plan import plan

if TYPE_CHECKING:
    from ferrum_mlx.verify.runs import Library, Subject

_LOADING = Lock()
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
INSTALL = {"mlx": "pip install 'ferrum-mlx'", "torch": "pip install 'ferrum-mlx[torch]'"}


def choose_backend(wanted: str) -> tuple[str, str]:
    """(backend, reason); nothing falls back silently, so the reason is shown everywhere.

    Raises:
        BackendUnavailableError: its array library is not installed.
    """
    if wanted == "fake":
        return "fake", "asked for by --backend: no model, scripted text"
    if wanted != "auto":
        if find_spec(wanted) is None:
            raise BackendUnavailableError(
                f"--backend {wanted}: the package {wanted} is not installed", next_step=INSTALL[wanted]
            )
        return wanted, "asked for by --backend"
    installed = [name for name in INSTALL if find_spec(name) is not None]
    if platform.system() == "Darwin" and platform.machine() == "arm64" and "mlx" in installed:
        return "mlx", "auto: Apple silicon"
    if "torch" in installed and NVIDIA_DRIVER.exists():
        return "torch", "auto: torch, for the NVIDIA GPU"
    if "torch" in installed and platform.system() == "Darwin":
        return "torch", "auto: mlx is not installed"
    if "torch" in installed:
        return "torch", "auto: no Apple or NVIDIA GPU; torch packs weights for CPUs"
    if "mlx" in installed:
        return "mlx", "auto: no NVIDIA GPU, and torch, which packs weights for CPUs, is not installed"
    raise BackendUnavailableError(
        "neither mlx nor torch is installed", next_step=f"{INSTALL['mlx']}, or {INSTALL['torch']}"
    )


def build_engine(config: EngineConfig, narrate: Callable[[str], None] = lambda what: None) -> Engine:
    """Find the model, load it, check it, size its KV pool.

    Args:
        narrate: told in words what is being done.

    Raises:
        FerrumError: whatever is wrong with model, backend, machine or events file.
    """
    return _build(config, narrate)[0]


def build_subject(config: EngineConfig, narrate: Callable[[str], None] = lambda what: None) -> Subject:
    """`build_engine` with what `verify` needs besides."""
    from ferrum_mlx.verify.runs import Subject

    engine, codec = _build(config, narrate)
    return Subject(engine, codec, config, _library(engine.ready().backend))


def _build(config: EngineConfig, narrate: Callable[[str], None]) -> tuple[Engine, TextCodec]:
    log = open_log(config.events)
    try:
        with _one_at_a_time(narrate):
            return _load(config, narrate, log)
    except BaseException:
        log.close()
        raise


@contextmanager
def _one_at_a_time(narrate: Callable[[str], None]) -> Iterator[None]:
    """Imports of transformers in two threads fail, and each load counts the memory that is free."""
    patience = 0.0
    while not _LOADING.acquire(timeout=patience):
        narrate("waiting for another engine of this process to load")
        patience = 5.0  # seconds, after which whoever stops this engine is heard
    try:
        yield
    finally:
        _LOADING.release()


def _load(config: EngineConfig, narrate: Callable[[str], None], log: EventLog) -> tuple[Engine, TextCodec]:
    codec: TextCodec
    backend, reason = choose_backend(config.backend)
    if backend == "fake":
        from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor

        fake, codec = FakeExecutor(config), FakeCodec()
        fake.prepare_startup()
        pair = pair_of_fakes(config, FakeExecutor)
        engine = Engine(
            fake, codec, config, backend=backend, backend_reason=reason, log=log, speculation=pair
        )
        return engine, codec

    narrate("finding the model")
    resolved = hub.resolve(config.model, offline=config.offline, progress=True, backend=backend)
    check_context(resolved, config.max_model_len)
    narrate(f"loading {resolved.name}")
    from ferrum_mlx.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolved)
    load: Callable[..., Loaded] = _backend(backend).load
    loaded = load(resolved, config, narrate)
    name = resolved.name
    del resolved  # with the reader of its file, whose mapping would count as memory from here on

    def load_draft(model: str) -> Loaded:
        narrate("finding the draft model")
        draft = hub.resolve(model, offline=config.offline, progress=True, backend=backend)
        check_same_vocabulary(tokenizer, load_tokenizer(draft), name, draft.name)
        narrate(f"loading {draft.name}")
        return load(draft, replace(config, model=model, adapters=()), narrate)

    executor, speculation, notes = build_executors(loaded, config, narrate, load_draft)
    engine = Engine(
        executor,
        tokenizer,
        config,
        backend=backend,
        backend_reason=f"{reason}; {loaded.route}; numerics {config.numerics}",
        notes=[plan(config, executor), *notes],
        log=log,
        speculation=speculation,
    )
    return engine, tokenizer


def _library(backend: str) -> Library | None:
    """The library's own generate, over an executor's model; None where there is none."""
    from ferrum_mlx.verify.runs import Library

    if backend == "mlx":
        from ferrum_mlx.backends.mlx.reference import generate

        return Library("mlx-lm", generate)
    if backend == "torch":
        from ferrum_mlx.backends.torch.reference import generate as by_transformers

        return Library("transformers", by_transformers)
    return None


def _backend(name: str, part: str = "build") -> ModuleType:
    """A module of the backend's folder."""
    try:
        return import_module(f"ferrum_mlx.backends.{name}.{part}")
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BackendUnavailableError(
            f"{name} cannot be loaded: {reason}", next_step=f"install it again: {INSTALL[name]}"
        ) from error


def zoo_survey(backend: str) -> Iterator[tuple[str, bool, str]]:
    """The library's model types, built tiny and checked on this machine as it comes to them, for `doctor`.

    Returns:
        A model type or `type/variant`; whether it is exact here; why not, or which fast paths are off.

    Raises:
        BackendUnavailableError: the library is not installed, or broken.
    """
    if find_spec(backend) is None:
        raise BackendUnavailableError(f"the package {backend} is not installed", next_step=INSTALL[backend])
    outcomes: Iterator[tuple[str, bool, str]] = _backend(backend, "zoo").survey()
    return outcomes


def doctor_facts(device: str = "") -> dict[str, str]:
    """What the chosen backend says of this machine, for `doctor`."""
    backend, reason = choose_backend("auto")
    return {"backend": backend, "backend_reason": reason, **_backend(backend).facts(device)}
