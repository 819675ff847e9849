"""What a repository's folder lacks of a model."""

from __future__ import annotations

import json
from pathlib import Path

from ferrum_mlx import hub_repo


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert hub_repo.is_complete(tmp_path)
    for text in ("[", "{}", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert not hub_repo.is_complete(tmp_path)
        assert hub_repo.lacks(tmp_path) == "a sound model.safetensors.index.json"


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    assert hub_repo.lacks(tmp_path) == "config.json"
    (tmp_path / "config.json").write_text("{}")
    assert hub_repo.lacks(tmp_path) == "tokenizer files"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub_repo.lacks(tmp_path) == "model.safetensors"
    for name, said in (
        ("a\x1b\n.safetensors", r"'a\x1b\n.safetensors', which"),
        ("../x", "is no name of a file"),
    ):
        index = json.dumps({"weight_map": {"a": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert said in hub_repo.lacks(tmp_path)
