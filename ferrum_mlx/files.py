"""Where files are kept, whether they are sound, and what a disk's refusal means in words."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

from ferrum_mlx.errors import DownloadError, ModelFileError, shown
from ferrum_mlx.plain import size

# Told (bytes here, bytes in all) while a download runs; what it raises ends the download.
Report = Callable[[int, int], None]

_LONGEST_NAME = 255  # bytes, on all common file systems

P = ParamSpec("P")
R = TypeVar("R")

_DISK_REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "it cannot be written",
    errno.EPERM: "it cannot be written",
    errno.EROFS: "it is on a read-only disk",
    errno.ENOENT: "it cannot be made",
    errno.ENOTDIR: "it is no folder",
    errno.EEXIST: "a file is where a folder should be",
}


def cache_dir() -> Path:
    """The folder of this program's downloads: $FERRUM_CACHE, else the platform's cache folder."""
    if named := os.environ.get("FERRUM_CACHE"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("ferrum-mlx", appauthor=False)


def sha256_of(path: Path) -> str:
    """Hexadecimal, of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inside(folder: Path, name: str) -> Path:
    """A file of a folder by a name that somebody else chose.

    Raises:
        ModelFileError: the name leads out of the folder.
    """
    encoded = name.encode(errors="replace")
    escapes = name.startswith("/") or ".." in PurePosixPath(name).parts
    if escapes or not 0 < len(encoded) <= _LONGEST_NAME or b"\0" in encoded or b"\\" in encoded:
        raise ModelFileError(
            f"{shown(name)} is no name of a file in {folder}", next_step="choose another model"
        )
    return folder / name


def check_space(folder: Path, needed: int) -> None:
    """Whether a folder has room for that many bytes.

    Raises:
        DownloadError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder} has {size(free)} free, {size(needed)} are needed",
            next_step="make room or choose another folder with FERRUM_CACHE (hub models: HF_HOME)",
        )


def disk_error(error: BaseException, folder: Path) -> DownloadError | None:
    """A refusal by the disk as one line; None for any other error."""
    reason = _DISK_REFUSALS.get(error.errno or 0) if isinstance(error, OSError) else None
    if reason is None:
        return None
    return DownloadError(
        f"cannot write to {folder}: {reason}",
        next_step="make room or choose another folder with FERRUM_CACHE (hub models: HF_HOME)",
    )


def readable(function: Callable[P, R]) -> Callable[P, R]:
    """Say which file may not be read, instead of failing with what the operating system said."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PermissionError as error:
            raise ModelFileError(
                f"{error.filename} cannot be read: permission denied",
                next_step="check its permissions, or set FERRUM_CACHE (hub models: HF_HOME) to one of yours",
            ) from error

    return call
