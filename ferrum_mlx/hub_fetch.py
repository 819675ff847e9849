"""Files of a hub's repository into the hub's cache: several at once, each checked before it gets its name.

A file lies in `blobs/` under its digest: sha256 for large files, git's sha1 for the repository's own. Until
it is whole it is called `<digest>.partial`, and the next download goes on from it, whatever ended this one.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_mlx.errors import DownloadError, UsageError
from ferrum_mlx.files import Report, check_space, sha256_of

if TYPE_CHECKING:
    from tqdm import tqdm
    from tqdm.asyncio import tqdm_asyncio

PARALLEL = 4  # files at a time: one stream of a hub seldom fills a line
_CHUNK = 1 << 20  # bytes between two looks at whether to go on; what an interruption can cost a file
_TICK_S = 0.1  # between two reports
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Blob:
    """One file that the cache is to hold.

    Attributes:
        path: in `blobs/`, named by its digest.
        size: bytes.
        label: what the file is called, for messages.
    """

    url: str
    path: Path
    size: int
    label: str

    @property
    def partial(self) -> Path:
        return self.path.with_suffix(".partial")


class _Stopped(Exception):
    """The download ends in another thread."""


class _Count:
    """Bytes that are here; its threads are told when to stop."""

    def __init__(self, here: int) -> None:
        self.here, self.stopped, self._lock = here, False, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.here += count
        if self.stopped:
            raise _Stopped


def is_digest(name: str) -> bool:
    return bool(_SHA256.fullmatch(name) or _GIT_SHA1.fullmatch(name))


def is_altered(path: Path, digest: str) -> bool:
    """Whether a file is not what its digest, of either kind, says; reads all of it."""
    if _SHA256.fullmatch(digest):
        return sha256_of(path) != digest
    content = path.read_bytes()  # small
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() != digest


@contextmanager
def alone(lock: Path, what: str, report: Callable[[], object], say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock that another process may hold, which is said; `report` is called while waiting."""
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    held, said = FileLock(lock), False
    while True:
        try:
            held.acquire(timeout=_TICK_S)
            break
        except Timeout:
            if not said:
                say(f"another process is fetching {what}: waiting for it")
            said = True
            report()
    try:
        yield
    finally:
        held.release()


@contextmanager
def unused(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock that nobody else holds.

    Raises:
        UsageError: another process does.
    """
    from filelock import FileLock, Timeout

    if not lock.parent.exists():
        yield
        return
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout as error:
        raise UsageError(
            f"another process is fetching {what}", next_step="stop it, or wait for it"
        ) from error


def fetch_blobs(blobs: Sequence[Blob], *, progress: bool, report: Report | None) -> None:
    """Download what is not there yet.

    Args:
        progress: show a bar on a terminal's stderr.
        report: called in this thread; what it raises ends the download.

    Raises:
        DownloadError: too little room, or a file that arrived altered.
        Exception: whatever the network or the disk raises.
    """
    blobs = list({blob.path: blob for blob in blobs}.values())
    total = sum(blob.size for blob in blobs)
    todo = [blob for blob in blobs if not blob.path.exists()]
    if not todo:
        return
    todo[0].path.parent.mkdir(parents=True, exist_ok=True)
    kept = sum(blob.partial.stat().st_size for blob in todo if _can_go_on(blob))
    missing = sum(blob.size for blob in todo) - kept
    check_space(todo[0].path.parent, missing)
    count = _Count(total - missing)
    pool = ThreadPoolExecutor(PARALLEL, "download")
    try:
        with _bar(progress, count.here, total) as bar:
            _watch([pool.submit(_fetch, blob, count) for blob in todo], count, total, bar, report)
    except BaseException as error:
        count.stopped = True
        pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
        raise
    pool.shutdown()


def _watch(
    futures: Sequence[Future[None]], count: _Count, total: int, bar: tqdm[Any], report: Report | None
) -> None:
    pending = set(futures)
    while True:
        done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
        bar.update(count.here - bar.n)
        if report is not None:
            report(count.here, total)
        for future in done:
            future.result()
        if not pending:
            return


def _can_go_on(blob: Blob) -> bool:
    """Whether there is a beginning; one that is too long is removed: the hub would refuse its range."""
    if not blob.partial.exists():
        return False
    if blob.partial.stat().st_size > blob.size:
        blob.partial.unlink()
        return False
    return True


def _fetch(blob: Blob, count: _Count) -> None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK)  # it has no argument for it
    with open(blob.partial, "ab") as out:
        http_get(
            blob.url,
            out,
            resume_size=out.tell(),
            headers=build_hf_headers(),
            expected_size=blob.size,
            displayed_filename=blob.label,
            tqdm_class=_counting(count),
        )
        out.flush()
        os.fsync(out.fileno())  # before the name says that it is whole
    if is_altered(blob.partial, blob.path.name):
        blob.partial.unlink()
        raise DownloadError(
            f"{blob.label} arrived altered: not what the hub's {_kind(blob)} says", next_step="pull again"
        )
    os.replace(blob.partial, blob.path)


def _kind(blob: Blob) -> str:
    return "sha256" if _SHA256.fullmatch(blob.path.name) else "git hash"


def _counting(count: _Count) -> type[tqdm_asyncio[Any]]:
    """The library's progress bar of one file, as a meter: nothing is drawn."""
    from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

    class Meter(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            count.add(int(n or 0))

    return Meter


def _bar(progress: bool, here: int, total: int) -> tqdm[Any]:
    from tqdm import tqdm

    hidden = not (progress and sys.stderr.isatty())
    return tqdm(total=total, initial=here, unit="B", unit_scale=True, disable=hidden, leave=False)
