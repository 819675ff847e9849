"""Fetching, checking and removing a repository, of a hub on this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ferrum_mlx import hub, hub_repo
from ferrum_mlx.catalog import HubSource
from ferrum_mlx.errors import (
    DownloadError,
    DownloadStoppedError,
    FerrumError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)

REPO = "tiny/model"


def test_fetch_then_find_without_network(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_offline_and_not_here(private_cache: Path, no_network: None) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not on this machine.*models pull tiny/model"):
        hub.resolve(REPO, offline=True)


@pytest.mark.parametrize("goes_on", ["in the same call", "in the next call"])
def test_a_broken_download_goes_on(goes_on: str, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    fake_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub.cut_after = 50_000
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    with pytest.raises(DownloadError):
        hub.resolve(REPO)
    small = sum(
        len(fake_hub.files[name]) for name in ("config.json", "tokenizer.json")
    )  # whole, and in no revision yet
    assert hub.partial_size(REPO) == hub.remove(REPO) == 50_000 + small
    assert not list(Path(os.environ["HF_HUB_CACHE"]).glob("models--*/blobs/*"))
    with pytest.raises(ModelNotFoundError):
        hub.remove(REPO)


def test_a_download_is_reported_stopped_and_goes_on(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    for part in (1, 2):
        fake_hub.files[f"model-{part}.safetensors"] = fake_hub.files["model.safetensors"] + bytes([part])
    wanted = ("config.json", "tokenizer.json", "model")
    total = sum(len(content) for name, content in fake_hub.files.items() if name.startswith(wanted))
    fake_hub.pause_s = 0.05
    seen: list[int] = []
    said: list[str] = []

    def report(done: int, of: int) -> None:
        assert of == total
        seen.append(done)
        if done > 60_000 and not said:
            raise DownloadStoppedError("stopped")

    with pytest.raises(DownloadStoppedError):
        hub.pull(REPO, report=report)
    kept = hub.partial_size(REPO)
    small = sum(len(fake_hub.files[name]) for name in ("config.json", "tokenizer.json"))  # arrived whole
    assert 60_000 <= kept <= total - 10_000
    fake_hub.pause_s = 0.0
    stopped_at = len(seen)
    hub.pull(REPO, report=report, say=said.append)
    assert seen == sorted(seen)
    assert seen[stopped_at] >= kept
    assert seen[-1] == total
    assert said[0] == f"fetching {REPO} from hub {REPO}@main"
    assert hub.partial_size(REPO) == 0
    ranges = [int(r[2][6:-1]) for r in fake_hub.requests if r[0] == "GET" and r[2]]
    assert sum(ranges) == kept - small


def test_an_altered_file_is_not_kept(fake_hub: Any) -> None:
    good = fake_hub.files["model.safetensors"]
    fake_hub.served["model.safetensors"] = good[:-1] + b"\0"
    with pytest.raises(DownloadError, match=r"model\.safetensors.*altered"):
        hub.resolve(REPO)
    with pytest.raises(ModelNotFoundError):
        hub.resolve(REPO, offline=True)
    fake_hub.served.clear()
    assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good


@pytest.mark.parametrize("damage", ["altered", "truncated"])
def test_pull_mends_what_is_damaged(damage: str, fake_hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fetched = hub.resolve(REPO)
    good = fake_hub.files["model.safetensors"]
    weights = fetched.path / "model.safetensors"
    weights.write_bytes(good[:-1] if damage == "truncated" else good[:-1] + b"\0")
    assert hub.pull(REPO) == fetched
    assert weights.read_bytes() == good
    assert f"{weights.resolve()} is altered: fetching it again" in capsys.readouterr().err


def test_pull_of_sound_files_fetches_nothing(fake_hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fetched = hub.resolve(REPO)
    fake_hub.requests.clear()
    capsys.readouterr()
    assert hub.pull(REPO) == fetched
    assert fake_hub.requests == []
    assert capsys.readouterr().err == ""


def test_a_file_whose_blob_is_gone_is_missed(fake_hub: Any) -> None:
    path = hub.resolve(REPO).path
    # of a name that the library has no listing of, as its older versions have of none
    (path / "tokenizer_config.json").symlink_to("../../blobs/" + "0" * 64)
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        hub.resolve(REPO, offline=True)


def test_links_that_lead_to_themselves(fake_hub: Any) -> None:
    """In every place of a cache that others write to, too; a pull mends what is the model's."""
    fetched = hub.resolve(REPO)
    good = {file.name: file.read_bytes() for file in fetched.path.iterdir()}
    for loop in (
        fetched.path / "model.safetensors",
        fetched.path / "loop.json",
        fetched.path.parent / ("f" * 40),
        hub_repo._blobs(HubSource(repo=REPO)) / ("0" * 64),
    ):
        loop.unlink(missing_ok=True)
        loop.symlink_to(loop.name)
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        hub.resolve(REPO, offline=True)
    assert [status.name for status in hub.list_models() if status.name == REPO] == []
    weights = len(good["model.safetensors"])  # whole, and linked to by nothing
    assert weights <= hub.partial_size(REPO) < weights + 1000
    path = hub.pull(REPO).path
    assert {name: (path / name).read_bytes() for name in good} == good
    assert hub.remove(REPO) >= weights
    assert hub.info(REPO).path is None


def test_too_long_a_partial_download_starts_again(fake_hub: Any) -> None:
    good = fake_hub.files["model.safetensors"]
    leave_partial(good + b"more")
    assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good


def test_an_altered_partial_download_is_removed(fake_hub: Any) -> None:
    good = fake_hub.files["model.safetensors"]
    leave_partial(good[:-1] + b"\0")
    with pytest.raises(DownloadError, match="altered"):
        hub.resolve(REPO)
    assert (hub.resolve(REPO).path / "model.safetensors").read_bytes() == good


def leave_partial(content: bytes) -> None:
    """As if a download of the weights had been interrupted."""
    path = hub.resolve(REPO).path / "model.safetensors"
    path.resolve().with_suffix(".partial").write_bytes(content)
    path.resolve().unlink()
    path.unlink()


@pytest.mark.parametrize("sha256", ["../../../../evil", "0" * 63, "A" * 64, ""])
def test_a_hub_that_states_no_sha256(
    sha256: str, fake_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lfs = {"sha256": sha256, "size": 1, "pointerSize": 1}
    monkeypatch.setattr(
        fake_hub, "_facts", lambda name, _: {"lfs": lfs} if name == "model.safetensors" else {}
    )
    with pytest.raises(DownloadError, match=r"no sha256 of model\.safetensors of hub tiny/model"):
        hub.resolve(REPO)
    assert list(tmp_path.rglob("evil*")) == []


def test_a_hub_that_states_no_commit(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_hub, "REVISION", "../../evil")
    with pytest.raises(DownloadError, match=r"no commit of hub tiny/model@main but '\.\./\.\./evil'"):
        hub.resolve(REPO)


def test_an_altered_small_file_is_not_kept(fake_hub: Any) -> None:
    good = fake_hub.files["config.json"]
    fake_hub.served["config.json"] = good.replace(b"llama", b"lLama")
    with pytest.raises(DownloadError, match=r"config\.json of hub tiny/model@main arrived altered.*git hash"):
        hub.resolve(REPO)
    with pytest.raises(ModelNotFoundError):
        hub.resolve(REPO, offline=True)
    fake_hub.served.clear()
    path = hub.resolve(REPO).path / "config.json"
    assert path.read_bytes() == good
    path.write_bytes(good.replace(b"llama", b"lLama"))
    assert hub.pull(REPO).path == path.parent
    assert path.read_bytes() == good


def test_a_hub_that_states_no_digests(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small files; then their length is all there is to check."""
    facts = fake_hub._facts
    monkeypatch.setattr(fake_hub, "_facts", lambda *args: facts(*args) | {"blobId": None})
    assert (hub.resolve(REPO).path / "config.json").read_bytes() == fake_hub.files["config.json"]


def test_a_listing_does_not_lead_out_of_the_cache(fake_hub: Any, tmp_path: Path) -> None:
    names = ["../../evil.json", "..\\..\\evil.json", "/tmp/evil.json", "model-x/../evil.json"]
    fake_hub.files.update(dict.fromkeys(names, b"{}"))
    path = hub.resolve(REPO).path
    assert [file for file in path.iterdir() if "evil" in file.name] == []
    assert [file for file in tmp_path.rglob("*evil*") if file.is_file()] == []
    fake_hub.files["a\0.json"] = b"{}"
    hub.remove(REPO)
    with pytest.raises(ModelFileError, match=r"a\\x00\.json' is no name of a file"):
        hub.resolve(REPO)


def test_a_repository_of_pickles_is_refused_by_name(fake_hub: Any) -> None:
    fake_hub.files["pytorch_model.bin"] = fake_hub.files.pop("model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"no safetensors weights but 'pytorch_model\.bin', a pickle"
    ):
        hub.resolve(REPO)
    assert not any(path.endswith(".bin") for _, path, _ in fake_hub.requests)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", r"accepted its terms; accept them at http.*/tiny/model, then run: hf auth login"),
        (401, "GatedRepo", r"accepted its terms"),
        (401, "", r"the hub refuses tiny/model without a token, .*run: hf auth login, or check HF_TOKEN"),
        (403, "", r"the hub refuses tiny/model"),
        (500, "", r"did not deliver tiny/model: .*500"),
    ],
)
def test_who_may_not_have_it_is_told(
    status: int, code: str, said: str, fake_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handler: Any) -> None:
        handler.send_response(status)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(fake_hub, "answer", refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(FerrumError, match=said) as caught:
        hub.resolve(REPO)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_too_small_a_disk_is_said_before_anything_is_fetched(
    fake_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=50_000))
    with pytest.raises(DownloadError, match=r"50\.0 kB free, 102 kB are needed; make room .*HF_HOME"):
        hub.resolve(REPO)
    assert [path for method, path, _ in fake_hub.requests if "/resolve/" in path] == []
    leave_partial_of(fake_hub, 60_000)
    assert hub.resolve(REPO).path.exists()  # what is here already needs no room


def leave_partial_of(fake_hub: Any, size: int) -> None:
    good = fake_hub.files["model.safetensors"]
    blobs = hub_repo._blobs(HubSource(repo=REPO))
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / f"{hashlib.sha256(good).hexdigest()}.partial").write_bytes(good[:size])


def test_removing_counts_what_is_on_the_disk(fake_hub: Any) -> None:
    path = hub.resolve(REPO).path
    blobs = path.parent.parent / "blobs"
    (blobs / "x.incomplete").write_bytes(b"x" * 1000)  # of the library
    on_disk = sum(file.stat().st_size for file in blobs.iterdir())
    other = path.parent / ("f" * 40)  # a second revision, of the same files
    other.mkdir()
    for file in path.iterdir():
        (other / file.name).symlink_to(file.readlink())
    assert hub.remove(REPO) == on_disk
    assert not path.parent.exists()


def test_all_files_are_of_one_commit(fake_hub: Any) -> None:
    hub.resolve(REPO)
    asked = [path for _, path, _ in fake_hub.requests]
    assert [path for path in asked if "main" in path] == [f"/api/models/{REPO}/revision/main"]


def test_programs_and_folders_are_never_fetched(fake_hub: Any) -> None:
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


def test_a_repository_that_is_not_there(fake_hub: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository tiny/other"):
        hub.resolve("tiny/other")


def test_a_repository_without_safetensors(fake_hub: Any) -> None:
    del fake_hub.files["model.safetensors"]
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        hub.resolve(REPO)


def test_an_unreachable_hub_is_one_line(fake_hub: Any) -> None:
    fake_hub.server.server_close()
    with pytest.raises(DownloadError, match="did not deliver tiny/model") as caught:
        hub.resolve(REPO)
    assert "\n" not in str(caught.value)


def test_remove(fake_hub: Any) -> None:
    path = hub.resolve(REPO).path
    assert hub.remove(REPO) >= len(fake_hub.files["model.safetensors"])
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        hub.remove(REPO)


def test_a_folder_that_cannot_be_written(fake_hub: Any, tmp_path: Path) -> None:
    (tmp_path / "hub-cache").write_text("a file is in the way")
    with pytest.raises(DownloadError, match=r"cannot write to .*hub-cache"):
        hub.resolve(REPO)
