"""What `ferrum-mlx doctor` says, in sections: one that is broken says so, and the others are still there."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from ferrum_mlx.errors import one_line
from ferrum_mlx.plain import size
from ferrum_mlx.sanitize import sanitize

Facts = dict[str, str]

PACKAGES = (
    *("mlx", "mlx-lm", "torch", "transformers", "tokenizers", "gguf", "numpy"),
    *("textual", "huggingface-hub"),
)
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_TERMINAL = ("TERM", "COLORTERM", "TERM_PROGRAM", "NO_COLOR", "TMUX")


def collect() -> Facts:
    """Every section's facts; no network call."""
    facts: Facts = {}
    for section in SECTIONS:
        # what a library prints as it fails is no fact; but stdout itself is one
        with nullcontext() if section is _terminal else redirect_stdout(sys.stderr):
            facts |= facts_of(section)
    return facts


def facts_of(section: Callable[[], Facts]) -> Facts:
    """A section's facts; what is broken or absent is itself a fact, never a crash."""
    try:
        return {name: sanitize(value) for name, value in section().items()}
    except Exception as error:  # whatever a broken installation raises
        return {section.__name__.strip("_"): f"not available: {one_line(error)}"}


def _versions() -> Facts:
    return {
        "ferrum-mlx": _version("ferrum-mlx"),
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": f"{platform.platform()} {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _backend() -> Facts:
    from ferrum_mlx.build import choose_backend

    backend, reason = choose_backend("auto")
    return {"backend": backend, "backend_reason": reason}


def _device() -> Facts:
    from ferrum_mlx.build import doctor_facts

    return doctor_facts()


def _blas() -> Facts:
    import numpy as np

    config = np.show_config(mode="dicts") or {}
    blas = config.get("Build Dependencies", {}).get("blas", {})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = [f"{name}={value}" for name in _THREADS if (value := os.environ.get(name))]
    return {
        "numpy_blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "threads": f"{cores} cores to use; " + (", ".join(asked) or "no limit on threads is set"),
    }


def _memory() -> Facts:
    import psutil

    from ferrum_mlx import memory

    limits = [f"{size(limit)} by {name}" for name, limit in memory.limits().items()]
    if (wired := memory.metal_limit()) is not None:
        limits.append(f"{size(wired)} wired for Metal")
    if (space := _address_space()) is not None:
        limits.append(f"{size(space)} by ulimit -v")
    installed = size(psutil.virtual_memory().total)
    return {
        "memory": f"{installed}, {size(memory.available())} available",
        "memory_limits": ", ".join(limits) or "none",
    }


def _address_space() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _cache() -> Facts:
    from huggingface_hub import constants

    from ferrum_mlx.files import cache_dir

    return {"cache": _folder(cache_dir()), "hub_cache": _folder(Path(constants.HF_HUB_CACHE))}


def _default_model() -> Facts:
    from ferrum_mlx import hub

    status = hub.info("")
    where = "not downloaded" if status.path is None else f"{size(status.size or 0)} at {status.path}"
    return {"default_model": f"{status.name}, {where}"}


def _files() -> Facts:
    from ferrum_mlx.chat.database import data_dir
    from ferrum_mlx.chat.settings import settings_file

    return {name: _there(path) for name, path in (("sessions", data_dir()), ("settings", settings_file()))}


def _network() -> Facts:
    from huggingface_hub import constants

    endpoint = urlsplit(constants.ENDPOINT)
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY") if os.environ.get(name)]
    offline = "yes, by HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "no"
    return {
        "offline": offline,
        # a name and a password before the host are nobody's business
        "hub": f"{endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}{endpoint.path}"
        + (f", through {', '.join(proxies)}" if proxies else ""),
    }


def _terminal() -> Facts:
    columns, lines = shutil.get_terminal_size()
    named = [f"{name}={os.environ[name]}" for name in _TERMINAL if os.environ.get(name)]
    over = "over ssh" if os.environ.get("SSH_CONNECTION") else "local"
    stream = "a terminal" if sys.stdout.isatty() else "no terminal"
    return {
        "terminal": f"stdout is {stream}, {columns} × {lines}, {over}, {sys.stdout.encoding}",
        "terminal_names": ", ".join(named) or "none of " + ", ".join(_TERMINAL),
    }


SECTIONS: tuple[Callable[[], Facts], ...] = (
    *(_versions, _backend, _device, _blas, _memory),
    *(_cache, _default_model, _files, _network, _terminal),
)


def _folder(folder: Path) -> str:
    """Where, how much is in it, and how much its disk has left."""
    if not folder.exists():
        return f"{folder}, not there yet; {size(_left(folder))} free"
    if not folder.is_dir():
        return f"{folder}, which is no folder"
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder}, which cannot be read: permission denied"
    used = sum(_sizes(folder))
    return f"{folder}, {size(used)} used, {size(_left(folder))} free" + (
        "" if os.access(folder, os.W_OK) else ", which cannot be written"
    )


def _left(folder: Path) -> int:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


def _sizes(folder: Path) -> Iterator[int]:
    """Of the files in a folder; links are not followed, they point to what is counted already."""
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(path, name))
            except OSError:
                continue  # a download in progress renames its files
            yield stat.st_size


def _there(path: Path) -> str:
    return str(path) if path.exists() else f"{path}, not there yet"
