"""Downloads that are interrupted, or two at once: real processes against a slow hub on this machine."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import hub, hub_repo
from ferrum_mlx.catalog import HubSource
from ferrum_mlx.errors import ModelNotFoundError, UsageError
from ferrum_mlx.hub_fetch import is_altered, is_digest

from .nursery import Nursery

REPO = "tiny/model"
SOURCE = HubSource(repo=REPO)
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
PULL = """
from huggingface_hub import HfApi, constants, file_download, snapshot_download
from ferrum_mlx import hub
constants.DOWNLOAD_CHUNK_SIZE = 10_000
pull = hub.pull
"""


@pytest.fixture
def sharded(fake_hub: Any) -> Any:
    content = random.Random(1)
    del fake_hub.files["model.safetensors"]
    fake_hub.files.update({name: content.randbytes(150_000) for name in SHARDS})
    names = ", ".join(f'"{number}": "{name}"' for number, name in enumerate(SHARDS))
    fake_hub.files["model.safetensors.index.json"] = f'{{"weight_map": {{{names}}}}}'.encode()
    fake_hub.files["generation_config.json"] = b"{}"
    return fake_hub


@pytest.fixture
def nursery(sharded: Any, tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(PULL, tmp_path / "log")
    yield made
    made.process.communicate()


def on_disk() -> int:
    """Bytes of the model that are here."""
    blobs, total = hub_repo._blobs(SOURCE), 0
    for file in blobs.glob("*") if blobs.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # it has its name now: the next look sees it
            total += file.stat().st_size
    return total


def unsound(fake_hub: Any) -> list[str]:
    """Files that are accepted, by the cache or as a model, and are not whole."""
    blobs = hub_repo._blobs(SOURCE)
    found = [blob.name for blob in blobs.glob("*") if is_digest(blob.name) and is_altered(blob, blob.name)]
    try:
        path = hub.resolve(REPO, offline=True).path
    except ModelNotFoundError:
        return found
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        *SHARDS,
    }
    return found + [
        name
        for name in wanted
        if not (path / name).exists() or (path / name).read_bytes() != fake_hub.files[name]
    ]


def test_killed_at_random_moments(sharded: Any, nursery: Nursery) -> None:
    """Twenty times; what has been fetched stays, and is not fetched again."""
    sharded.pause_s = 0.03
    here = 0
    for code in nursery.killed(20, REPO, seed=8, longest=0.4):
        assert unsound(sharded) == []
        assert on_disk() >= here
        here = on_disk()
        if code == 0:  # it was quicker: begin again
            hub.remove(REPO)
            here = 0
    assert nursery.wait(nursery.pull(REPO)) == 0, nursery.log.read_text()
    assert hub.resolve(REPO, offline=True).revision == sharded.REVISION
    assert unsound(sharded) == []
    size = sum(len(sharded.files[name]) for name in SHARDS)
    resumed = [int(r[2][6:-1]) for r in sharded.requests if r[2]]
    assert sum(start > 0 for start in resumed) >= 3
    assert on_disk() < size + 1000
    weights = hub.resolve(REPO, offline=True).path / SHARDS[0]
    weights.write_bytes(weights.read_bytes()[:-1])  # would the check notice?
    assert len(unsound(sharded)) == 2


def test_two_at_once(sharded: Any, nursery: Nursery) -> None:
    sharded.pause_s = 0.02
    pids = [nursery.pull(REPO), nursery.pull(REPO), nursery.pull(REPO)]
    assert [nursery.wait(pid) for pid in pids] == [0, 0, 0], nursery.log.read_text()
    assert unsound(sharded) == []
    fetched = [
        path for method, path, _ in sharded.requests if method == "GET" and path.endswith(".safetensors")
    ]
    assert sorted(path.rpartition("/")[2] for path in fetched) == SHARDS
    assert nursery.log.read_text().count("another process is fetching hub tiny/model@main: waiting") == 2


def test_shards_are_fetched_side_by_side(sharded: Any) -> None:
    working = most = 0
    answer: Callable[[Any], None] = sharded.answer

    def counting(handler: Any) -> None:
        nonlocal working, most
        working += handler.path.endswith(".safetensors")
        most = max(most, working)
        answer(handler)
        working -= handler.path.endswith(".safetensors")

    sharded.answer, sharded.pause_s = counting, 0.01
    hub.resolve(REPO)
    assert most == 3


def test_nothing_is_removed_under_a_download(sharded: Any, nursery: Nursery) -> None:
    sharded.pause_s = 0.02
    pid = nursery.pull(REPO)
    while not on_disk():
        time.sleep(0.01)
    with pytest.raises(UsageError, match="another process is fetching"):
        hub.remove(REPO)
    assert nursery.wait(pid) == 0
    assert hub.remove(REPO) > 400_000


def test_ctrl_c_leaves_what_is_there(sharded: Any) -> None:
    sharded.pause_s = 0.1
    program = (
        "import sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 10_000;"
        "from ferrum_mlx.cli.main import main; sys.argv[0] = 'ferrum-mlx'; main()"
    )
    command = [sys.executable, "-c", program, "models", "pull", REPO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while on_disk() < 90_000:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, ""), said
    kept = re.search(
        r"^stopped; ([\d.]+) kB are kept, to go on run: ferrum-mlx models pull tiny/model$", said, re.M
    )
    assert kept, said
    assert 0 < float(kept[1]) < 450
    assert "Traceback" not in said
    assert unsound(sharded) == []
    sharded.pause_s, begun = 0.0, len(sharded.requests)
    hub.pull(REPO)
    assert unsound(sharded) == []
    assert sum(bool(request[2]) for request in sharded.requests[begun:]) >= 2
