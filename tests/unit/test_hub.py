"""What a model's name resolves to: own files, cards, repositories; the cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrum_mlx import hub
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import (
    DownloadError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)


def test_a_gguf_file_and_a_folder(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    file = hub.resolve(str(tmp_path / "m.gguf"))
    assert (file.format, file.path, file.card) == ("gguf", tmp_path / "m.gguf", None)
    assert hub.resolve(str(folder)).format == "safetensors"
    assert hub.info(str(folder)).size == 6


def test_an_incomplete_folder(tmp_path: Path, no_network: None) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "model-1.safetensors").write_text("")
    with pytest.raises(
        ModelFileError, match=r"no complete model: it lacks 'model-2\.safetensors', which its"
    ):
        hub.resolve(str(tmp_path))
    (tmp_path / "model-2.safetensors").write_text("")
    assert hub.resolve(str(tmp_path)).path == tmp_path


@pytest.mark.parametrize("name", ["none.gguf", "./none", "/no/such/folder", "~/none"])
def test_a_path_that_is_not_there(name: str, no_network: None) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        hub.resolve(name)


def test_a_pipe_or_a_device_is_no_file(tmp_path: Path, no_network: None) -> None:
    os.mkfifo(tmp_path / "p.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for name in ("p.gguf", "zero.gguf"):
        with pytest.raises(ModelFileError, match=rf"{name} is no file; allowed: a folder"):
            hub.resolve(str(tmp_path / name))


def test_an_address_at_which_the_library_breaks(monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    for endpoint in ("http://host:99999999", "http://[::1", "http://host:x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        for call in (hub.list_models, lambda: hub.resolve("qwen3-4b"), lambda: hub.pull("a/b")):
            with pytest.raises(UsageError, match=r"HF_ENDPOINT is 'http.*mend or unset it"):
                call()
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443/models")
    assert hub.list_models()


def test_a_hub_cache_that_may_not_be_read_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    assert hub.list_models()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ModelFileError, match="cannot be read: permission denied") as caught:
        hub.list_models()
    assert str(constants.HF_HUB_CACHE) in caught.value.what


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 5000, "/" + "x" * 5000, "a/" + "x" * 5000])
def test_a_path_the_system_refuses(name: str, no_network: None) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder") as caught:
        hub.resolve(name)
    assert name[:10] in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "m.txt").write_bytes(b"")
    with pytest.raises(ModelFileError, match="no model"):
        hub.resolve(str(tmp_path / "m.txt"))


def test_pickles_are_refused_by_name(tmp_path: Path, no_network: None) -> None:
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.* a pickle"):
            hub.resolve(str(path))
    (tmp_path / "model.safetensors").write_text("{}")
    assert hub.resolve(str(tmp_path)).format == "safetensors"


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "a\0b", "", "..\\x", "x/../../y"]
)
def test_an_index_does_not_lead_out_of_its_folder(name: str, tmp_path: Path, no_network: None) -> None:
    folder = tmp_path / "folder"
    for path in (folder / "x", tmp_path / "other"):
        path.mkdir(parents=True)
    for path in (folder / "config.json", folder / "tokenizer.json", tmp_path / "other" / "model.safetensors"):
        path.write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFileError, match="no complete model"):
        hub.resolve(str(folder))


def test_the_environment_forbids_the_network(
    private_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"not on this machine.*models pull"):
        hub.resolve("")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        hub.pull("")


def test_own_files_are_not_removed(tmp_path: Path, no_network: None) -> None:
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
        hub.resolve("tiny/model")


def test_the_cache_folder_is_the_named_one_or_the_platforms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FERRUM_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.delenv("FERRUM_CACHE")
    assert hub.cache_dir().name == "ferrum-mlx"


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
