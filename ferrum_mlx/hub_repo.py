"""One source of models: a repository on a hub, through huggingface_hub and its cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_mlx.catalog import HubSource
from ferrum_mlx.errors import (
    DownloadError,
    FerrumError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    shown,
)
from ferrum_mlx.files import Report, disk_error, inside, sha256_of
from ferrum_mlx.hub_card import check_against_card
from ferrum_mlx.hub_fetch import Blob, alone, fetch_blobs, is_altered, is_digest, unused

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo
    from huggingface_hub.hf_api import RepoSibling

PROBE_TIMEOUT_S = 5.0  # an unreachable hub costs this much, not minutes
_WANTED = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*"]
_UNWANTED = ["*/*", "*.py"]
_WEIGHTS = "model*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256_DIGITS = 64


def cached(source: HubSource) -> Path | None:
    """What a source stands for, its folder or its one file, if all is in the hub's cache; no network call."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=_wanted(source),
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except (OSError, HFValidationError):
        return None
    if source.file:
        file = Path(folder) / source.file
        return file if file.exists() else None
    if any(not file.exists() for file in Path(folder).iterdir()):  # a link whose blob is gone
        return None
    return Path(folder) if is_complete(Path(folder)) else None


def _wanted(source: HubSource) -> list[str]:
    return [source.file] if source.file else _WANTED


def is_complete(folder: Path) -> bool:
    """Whether config, tokenizer and every weights file that the index names are there."""
    return not lacks(folder)


def lacks(folder: Path) -> str:
    """What a folder has not that a model needs, in words; "" where all is there."""
    if not (folder / "config.json").exists():
        return "config.json"
    if not any(folder.glob("tokenizer*")):
        return "tokenizer files"
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return "" if (folder / "model.safetensors").exists() else "model.safetensors"
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        lost = next((file for file in files if not inside(folder, file).exists()), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"a sound {index.name}"
    except ModelFileError as error:
        return f"a sound {index.name}: {error.what}"
    return "" if lost is None else f"{shown(lost)}, which its index names"


def pickles(folder: Path) -> str:
    """A file of a folder that holds weights as a program to be run; "" if there is none."""
    return next((file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))), "")


def fetch(
    source: HubSource,
    *,
    progress: bool,
    report: Report | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Path:
    """Download what is missing, going on where an interrupted download stopped, and check it.

    A second process that does the same waits for the first.

    Raises:
        ModelNotFoundError: the hub has no such repository, or shows it only to others.
        UnsupportedModelError: the repository has no safetensors weights.
        ModelFileError: the file is not the one that the card names.
        DownloadError: network or disk; or a file that arrived altered.
    """
    with _errors_in_words(source):
        commit, files = _files_on_hub(source)
        stated = _digest(files[0])
        told = stated is not None and len(stated) == _SHA256_DIGITS  # of a large file, before it is fetched
        if source.sha256 and told:
            check_against_card(source, str(stated), True, say)
        blobs = [blob for file in files if (blob := _blob(source, commit, file))]
        total = sum(blob.size for blob in blobs)
        with alone(_lock(source), source.label, lambda: report and report(0, total), say):
            fetch_blobs(blobs, progress=progress, report=report)
            if not source.file:
                _link(source, commit, ignore=[*_UNWANTED, _WEIGHTS])
            folder = _link(source, commit, ignore=_UNWANTED)  # weights last: who finds them finds all
            for file in files:
                _check(source, folder, file)
            if source.sha256 and not told:
                try:
                    check_against_card(source, sha256_of(folder / source.file), stated is not None, say)
                except ModelFileError:
                    _discard(folder / source.file)
                    raise
            if not source.file and not is_complete(folder):
                raise DownloadError(f"{source.label} came without some of its files", next_step="try again")
            _name_commit(source, commit)
    return folder / source.file


def _discard(path: Path) -> None:
    """Delete a file of a snapshot, and what it links to."""
    _target(path).unlink()
    path.unlink(missing_ok=True)


def remove_altered(source: HubSource) -> list[Path]:
    """Delete the files of a repository's cache that are not what their names say; reads all of them.

    Raises:
        DownloadError: the disk refuses.
    """
    with _errors_in_words(source):
        blobs = [blob for blob in _blobs(source).glob("*") if is_digest(blob.name) and blob.exists()]
        altered = [blob for blob in blobs if is_altered(blob, blob.name)]
        for blob in altered:
            blob.unlink()
    return altered


def repos() -> list[CachedRepoInfo]:
    """Model repositories in the hub's cache, whoever fetched them."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):  # ValueError: the cache folder is a file
        return []
    return sorted((repo for repo in found if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def remove(source: HubSource) -> int:
    """Delete all revisions of a repository, and what interrupted downloads have left.

    Returns:
        Bytes freed: files that the library keeps for other repositories, too, are not among them.

    Raises:
        UsageError: another process is fetching it.
    """
    from huggingface_hub import constants, scan_cache_dir

    with unused(_lock(source), source.label):
        freed = 0
        for link in _blobs(source).parent.glob("snapshots/**/*"):
            if link.is_symlink() and not link.exists():  # the library would leave the repository alone
                link.unlink()
        for left in _unlinked(source):
            freed += left.lstat().st_size
            left.unlink()
        revisions = [
            rev.commit_hash for repo in repos() if repo.repo_id == source.repo for rev in repo.revisions
        ]
        if revisions:
            plan = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*revisions)
            plan.execute()
            freed += plan.expected_freed_size
    return freed


def partial_size(source: HubSource) -> int:
    """Bytes that interrupted downloads have left, for the next one to go on from."""
    total = 0
    for left in _unlinked(source):
        with contextlib.suppress(FileNotFoundError):  # another process is done with it
            total += left.lstat().st_size if left.suffix != ".incomplete" else 0
    return total


def is_offline() -> bool:
    """Whether the environment forbids the network: HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _folder(source: HubSource) -> str:
    from huggingface_hub.file_download import repo_folder_name

    return repo_folder_name(repo_id=source.repo, repo_type="model")


def _blobs(source: HubSource) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / _folder(source) / "blobs"


def _unlinked(source: HubSource) -> list[Path]:
    """What no revision has: beginnings of files, and whole ones of a download that did not get to its end."""
    blobs = _blobs(source)
    linked = {_target(link) for link in blobs.parent.glob("snapshots/**/*") if link.is_symlink()}
    return [blob for blob in blobs.glob("*") if _target(blob) not in linked]


def _target(link: Path) -> Path:
    """Where a link leads; a loop, which Path.resolve raises RuntimeError for, leads to itself."""
    return Path(os.path.realpath(link))


def _lock(source: HubSource) -> Path:
    """Beside the library's own locks."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ".locks" / _folder(source) / "pull.lock"


def _files_on_hub(source: HubSource) -> tuple[str, list[RepoSibling]]:
    """The commit and those of its files that are wanted; the first call to the hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._paths import filter_repo_objects

    info = HfApi().model_info(
        source.repo, revision=source.revision, timeout=PROBE_TIMEOUT_S, files_metadata=True
    )
    if not _COMMIT.fullmatch(info.sha or ""):  # it becomes a folder's name
        raise DownloadError(f"the hub names no commit of {source.label} but {shown(info.sha)}")
    files = list(
        filter_repo_objects(
            info.siblings or [],
            allow_patterns=_wanted(source),
            ignore_patterns=_UNWANTED,
            key=lambda file: file.rfilename,
        )
    )
    for file in files:
        inside(Path(), file.rfilename)
        digest = _digest(file)  # it becomes a file's name
        if digest is not None and not (is_digest(digest) and (file.lfs is None or len(digest) == 64)):
            raise DownloadError(
                f"the hub names no {'git hash' if file.lfs is None else 'sha256'} of {file.rfilename} of "
                f"{source.label} but {shown(digest)}"
            )
    if source.file and not files:
        raise ModelNotFoundError(
            f"{source.repo} has no file {source.file}", next_step="choose another variant, or its repository"
        )
    if not source.file and not any(fnmatch(file.rfilename, _WEIGHTS) for file in files):
        raise UnsupportedModelError(
            f"{source.repo} has no safetensors weights{_named(info.siblings or [])}",
            next_step="choose another repository, or download a .gguf file of it and give its path",
        )
    return str(info.sha), files


def _named(files: list[RepoSibling]) -> str:
    for file in files:
        if any(fnmatch(file.rfilename, pattern) for pattern in _PICKLES):
            return f" but {shown(file.rfilename)}, a pickle, which may run any program and is never read"
    return ""


def _digest(file: RepoSibling) -> str | None:
    return file.blob_id if file.lfs is None else file.lfs.sha256


def _blob(source: HubSource, commit: str, file: RepoSibling) -> Blob | None:
    """Where a file goes in the cache; None where the hub states no digest, and the library fetches it."""
    from huggingface_hub import hf_hub_url

    digest, size = _digest(file), file.size if file.lfs is None else file.lfs.size
    if digest is None or size is None:
        return None
    url = hf_hub_url(source.repo, file.rfilename, revision=commit)
    return Blob(url, _blobs(source) / digest, size, f"{file.rfilename} of {source.label}")


def _link(source: HubSource, commit: str, *, ignore: list[str]) -> Path:
    """The library's own step: a snapshot's folder over the blobs that are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Hidden(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

    folder = snapshot_download(
        source.repo,
        revision=commit,
        allow_patterns=_wanted(source),
        ignore_patterns=ignore,
        etag_timeout=PROBE_TIMEOUT_S,
        tqdm_class=Hidden,
    )
    return Path(folder)


def _check(source: HubSource, folder: Path, file: RepoSibling) -> None:
    """What the library fetched itself, under another name, is checked here; it is not kept if altered."""
    path, digest = folder / file.rfilename, _digest(file)
    if digest is None or _target(path).name == digest or not is_altered(path, digest):
        return
    _discard(path)
    raise DownloadError(
        f"{file.rfilename} of {source.label} arrived altered: not what the hub's digest says",
        next_step="pull again",
    )


def _name_commit(source: HubSource, commit: str) -> None:
    """Note in the hub's cache which commit a revision is; done last, so that it names only checked files."""
    if source.revision != commit:
        ref = inside(_blobs(source).parent / "refs", source.revision)
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = _blobs(source) / "ref.partial"
        partial.write_text(commit)
        os.replace(partial, ref)


@contextmanager
def _errors_in_words(source: HubSource) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except FerrumError:
        raise
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{source.repo} is shown only to those who accepted its terms",
            next_step=f"accept them at {constants.ENDPOINT}/{source.repo}, then run: hf auth login",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelNotFoundError(
            f"the hub has no repository {source.repo} with a revision {source.revision}, or it is private",
            next_step="check the name; for a private one run: hf auth login",
        ) from error
    except OfflineModeIsEnabled as error:
        raise DownloadError(
            f"{source.repo} cannot be fetched: HF_HUB_OFFLINE is set", next_step="unset it"
        ) from error
    except Exception as error:  # the library's HTTP client is its own affair, and changes with its versions
        if refused := disk_error(error, Path(constants.HF_HUB_CACHE)):
            raise refused from error
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise ModelNotFoundError(
                f"the hub refuses {source.repo} without a token, or to the one it was shown",
                next_step="run: hf auth login, or check HF_TOKEN",
            ) from error
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise DownloadError(f"the hub did not deliver {source.repo}: {reason}") from error
