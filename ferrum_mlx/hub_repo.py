"""One source of models: a repository on a hub, through huggingface_hub and its cache."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_mlx.catalog import HubSource
from ferrum_mlx.errors import DownloadError, FerrumError, ModelNotFoundError, UnsupportedModelError, shown
from ferrum_mlx.files import disk_error, sha256_of

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo
    from huggingface_hub.hf_api import RepoSibling
    from tqdm.asyncio import tqdm_asyncio

PROBE_TIMEOUT_S = 5.0  # an unreachable hub costs this much, not minutes
_WANTED = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*"]
_UNWANTED = ["*/*", "*.py"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cached(source: HubSource) -> Path | None:
    """The folder of a repository whose files are all in the hub's cache; no network call."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except (OSError, HFValidationError):
        return None
    if any(not file.exists() for file in Path(folder).iterdir()):  # a link whose blob is gone
        return None
    return Path(folder) if is_complete(Path(folder)) else None


def is_complete(folder: Path) -> bool:
    """Whether config, tokenizer and every weights file that the index names are there."""
    if not (folder / "config.json").exists() or not any(folder.glob("tokenizer*")):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return (folder / "model.safetensors").exists()
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / file).exists() for file in files)


def fetch(source: HubSource, *, progress: bool) -> Path:
    """Download what is missing, going on where an interrupted download stopped, and check it.

    Raises:
        ModelNotFoundError: the hub has no such repository, or shows it only to others.
        UnsupportedModelError: the repository has no safetensors weights.
        DownloadError: network or disk; or a file that arrived altered.
    """
    from huggingface_hub import snapshot_download

    with _errors_in_words(source):
        commit, files = _files_on_hub(source)
        for file in files:
            _fetch_large(source, commit, file, _bar(progress))
        folder = Path(
            snapshot_download(
                source.repo,
                revision=commit,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                etag_timeout=PROBE_TIMEOUT_S,
                tqdm_class=_bar(False),
            )
        )
        for file in files:
            _check_small(source, folder, file)
        if not is_complete(folder):
            raise DownloadError(f"{source.label} came without some of its files", next_step="try again")
        _name_commit(source, commit)
    return folder


def remove_altered(source: HubSource) -> list[Path]:
    """Delete the large files of a repository's cache that are not what their names say; reads all of them.

    Raises:
        DownloadError: the disk refuses.
    """
    with _errors_in_words(source):
        blobs = [blob for blob in _blobs(source).glob("*") if _SHA256.fullmatch(blob.name)]
        altered = [blob for blob in blobs if sha256_of(blob) != blob.name]
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
    """Delete all revisions of a repository, and what interrupted downloads have left; bytes freed."""
    from huggingface_hub import constants, scan_cache_dir

    freed = 0
    for partial in _blobs(source).glob("*.partial"):
        freed += partial.stat().st_size
        partial.unlink()
    revisions = [rev.commit_hash for repo in repos() if repo.repo_id == source.repo for rev in repo.revisions]
    if revisions:
        plan = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*revisions)
        plan.execute()
        freed += plan.expected_freed_size
    return freed


def _blobs(source: HubSource) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=source.repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "blobs"


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
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            key=lambda file: file.rfilename,
        )
    )
    for file in files:
        if file.lfs is not None and not _SHA256.fullmatch(file.lfs.sha256):  # so does this, of a file
            raise DownloadError(
                f"the hub names no sha256 of {file.rfilename} of {source.label} but {shown(file.lfs.sha256)}"
            )
    if not any(fnmatch(file.rfilename, "model*.safetensors") for file in files):
        raise UnsupportedModelError(
            f"{source.repo} has no safetensors weights",
            next_step="choose another repository, or download a .gguf file of it and give its path",
        )
    return str(info.sha), files


def _fetch_large(source: HubSource, commit: str, file: RepoSibling, bar: type[tqdm_asyncio[Any]]) -> None:
    """Put one large file into the hub's cache, as the blob that its sha256 names.

    snapshot_download would start a file again after an interruption; this goes on from its `.partial`.
    """
    from filelock import FileLock
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    if file.lfs is None:
        return  # small enough to live in the repository itself
    blob = _blobs(source) / file.lfs.sha256
    partial = blob.with_suffix(".partial")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(blob.with_suffix(".partial.lock")):
        if blob.exists():
            return
        if partial.exists() and partial.stat().st_size > file.lfs.size:
            partial.unlink()  # nothing to go on from: the hub would refuse the range
        with open(partial, "ab") as out:
            http_get(
                hf_hub_url(source.repo, file.rfilename, revision=commit),
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.lfs.size,
                displayed_filename=file.rfilename,
                tqdm_class=bar,
            )
        if sha256_of(partial) != file.lfs.sha256:
            partial.unlink()
            raise DownloadError(
                f"{file.rfilename} of {source.label} arrived altered: not the sha256 the hub states",
                next_step="pull again",
            )
        os.replace(partial, blob)


def _check_small(source: HubSource, folder: Path, file: RepoSibling) -> None:
    """Compare a file of the repository itself with its git hash; an altered one is not kept."""
    path = folder / file.rfilename
    if file.lfs is not None or file.blob_id is None or not path.exists():
        return
    content = path.read_bytes()
    if sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == file.blob_id:
        return
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise DownloadError(
        f"{file.rfilename} of {source.label} arrived altered: not the git hash the hub states",
        next_step="pull again",
    )


def _name_commit(source: HubSource, commit: str) -> None:
    """Note in the hub's cache which commit a revision is; done last, so that it names only checked files."""
    if source.revision != commit:
        ref = _blobs(source).parent / "refs" / source.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)


def _bar(progress: bool) -> type[tqdm_asyncio[Any]]:
    """A progress bar's class; its bars stay silent where nobody would see them."""
    from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

    class Bar(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not (progress and sys.stderr.isatty()):
                kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Bar


@contextmanager
def _errors_in_words(source: HubSource) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except FerrumError:
        raise
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{source.repo} is shown only to those who accepted its terms", next_step="run: hf auth login"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelNotFoundError(
            f"the hub has no repository {source.repo} with a revision {source.revision}, or it is private",
            next_step="check the name; for a private one run: hf auth login",
        ) from error
    except Exception as error:  # the library's HTTP client is its own affair, and changes with its versions
        if refused := disk_error(error, Path(constants.HF_HUB_CACHE)):
            raise refused from error
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DownloadError(f"the hub did not deliver {source.repo}: {reason}") from error
