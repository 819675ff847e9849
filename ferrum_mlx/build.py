"""Configuration to a running engine: the only place that knows which backends there are."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.util import find_spec

from ferrum_mlx import hub
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import BackendUnavailableError
from ferrum_mlx.events import EventLog, open_log

# Read when numpy's OpenBLAS is loaded, so set before the first backend is. Its threads spin for 2^26
# cycles after a product by default, and starve a busy machine, this engine included; 2^20 cycles span
# the gap to the next product of the same forward. bench/NOTES.md has the figures.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")


def choose_backend(wanted: str) -> tuple[str, str]:
    """(backend, reason); nothing falls back silently, so the reason is shown everywhere."""
    if wanted == "torch":
        raise BackendUnavailableError(
            "--backend torch is not built yet", "allowed: auto, mlx", "leave --backend away"
        )
    if wanted == "fake":
        return "fake", "asked for by --backend: no model, scripted text"
    if find_spec("mlx") is None:
        raise BackendUnavailableError(
            "the package mlx is not installed", next_step="pip install 'ferrum-mlx'"
        )
    if wanted == "mlx":
        return "mlx", "asked for by --backend"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "mlx", "auto: Apple silicon"
    return "mlx", "auto: the only backend that is built so far"


def build_engine(config: EngineConfig, narrate: Callable[[str], None] = lambda what: None) -> Engine:
    """Find the model, load it, check it, size its KV pool.

    Args:
        narrate: told in words what is being done.

    Raises:
        FerrumError: whatever is wrong with model, backend, machine or events file.
    """
    log = open_log(config.events)
    try:
        return _build(config, narrate, log)
    except BaseException:
        log.close()
        raise


def _build(config: EngineConfig, narrate: Callable[[str], None], log: EventLog) -> Engine:
    backend, reason = choose_backend(config.backend)
    if backend == "fake":
        from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor

        fake = FakeExecutor(config)
        fake.prepare_startup()
        return Engine(fake, FakeCodec(), config, backend=backend, backend_reason=reason, log=log)

    narrate("finding the model")
    resolved = hub.resolve(config.model, offline=config.offline, progress=True)
    narrate(f"loading {resolved.name}")
    from ferrum_mlx.backends.mlx.build import build_executor
    from ferrum_mlx.tokenizer import load_tokenizer

    codec = load_tokenizer(resolved)
    executor, route, notes = build_executor(resolved, config, narrate)
    reason = f"{reason}; {route}; numerics {config.numerics}"
    return Engine(executor, codec, config, backend=backend, backend_reason=reason, notes=notes, log=log)


def doctor_facts(device: str = "") -> dict[str, str]:
    """What the chosen backend says of this machine, for `doctor`."""
    backend, reason = choose_backend("auto")
    from ferrum_mlx.backends.mlx.build import facts

    return {"backend": backend, "backend_reason": reason, **facts(device)}
