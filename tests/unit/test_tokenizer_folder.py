"""A folder's tokenizer files, from whoever made them: checked before a text meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError
from ferrum_mlx.tokenizer import load_tokenizer

from .tiny_tokenizers import byte_level


def saved(folder: Path, **changes: object) -> ResolvedModel:
    """A folder with a tokenizer, parts of its file changed."""
    byte_level()._hf.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return ResolvedModel(name="m", path=folder, format="safetensors")


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_rules_that_blow_up_a_text_are_refused(kind: str, tmp_path: Path) -> None:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    for count, fine in ((9, True), (40, False)):
        model = saved(tmp_path, **{kind: {"type": "Sequence", f"{kind}s": [rule] * count}})
        if fine:
            load_tokenizer(model)
            continue
        with pytest.raises(ModelFileError, match=rf"1\.09951e\+12 times as long by its {kind}"):
            load_tokenizer(model)


def test_a_pattern_that_gives_up_is_said(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(saved(tmp_path, pre_tokenizer=split))
    with pytest.raises(ModelFileError, match="cannot take this text"):
        tokenizer.encode("a" * 30 + "b")


def test_a_tokenizer_file_larger_than_any_real_one(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with open(tmp_path / "vocab.json", "wb") as file:
        file.truncate(10**12)  # sparse
    with pytest.raises(ModelFileError, match="1000000000000 bytes; at most"):
        load_tokenizer(model)
