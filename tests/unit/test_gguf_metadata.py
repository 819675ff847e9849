"""Metadata of a GGUF is a stranger's: of every key, a value of another type is one clear error."""

from __future__ import annotations

import ast
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrum_mlx
from ferrum_mlx import gguf
from ferrum_mlx.build import build_engine
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ModelFileError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_config import eos_token_ids, hf_config
from ferrum_mlx.gguf_tokenizer import build_tokenizer
from ferrum_mlx.gguf_weights import GGUFWeights
from ferrum_mlx.tokenizer import Tokenizer

from .hostile_files import write_sentencepiece

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
SOUND: dict[str, dict[str, Any]] = {
    "gpt2": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": ["a b"],
    },
    "llama": {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.zeros(6, np.float32),
        "tokenizer.ggml.add_space_prefix": True,
    },
}
BOTH = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1]),
    **{f"tokenizer.ggml.{role}_token_id": 2 for role in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
ODD = ["x", 7, 0.5, True, ["x", "y"], [], np.array([1, 2]), np.array([], np.float32), np.array([True])]


@pytest.fixture
def file(tmp_path: Path, write_gguf: Callable[..., Any]) -> GGUFFile:
    write_gguf(tmp_path / "m.gguf")
    return GGUFFile(tmp_path / "m.gguf")


def load(file: GGUFFile) -> Tokenizer:
    """All that is made of metadata."""
    GGUFWeights(file)
    return Tokenizer(build_tokenizer(file), frozenset(eos_token_ids(file)))


@pytest.mark.parametrize("kind", SOUND)
def test_values_of_another_type_are_refused_by_name(kind: str, file: GGUFFile) -> None:
    own = {key: value for key, value in file.metadata.items() if key.startswith("llama.")}
    sound = file.metadata | BOTH | SOUND[kind]
    file.metadata = sound
    assert load(file).encode("ab")
    for key, right in (own | BOTH | SOUND[kind]).items():
        for odd in ODD:
            if type(odd) is type(right) or (type(right) is float and type(odd) is int):
                continue
            file.metadata = {**sound, key: odd}
            with pytest.raises(ModelFileError, match=rf"{key} is .* is expected") as caught:
                load(file)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 600


def test_a_model_of_another_kind_is_told_before_its_tokens_are_read(file: GGUFFile) -> None:
    file.metadata |= BOTH | SOUND["llama"] | {"general.architecture": np.array([1, 2])}
    with pytest.raises(ModelFileError, match=r"general\.architecture is array.*a text is expected"):
        build_tokenizer(file)  # alone, as a draft's vocabulary is read


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_a_beginning_that_is_no_token(token_id: int, file: GGUFFile) -> None:
    file.metadata |= {"tokenizer.ggml.bos_token_id": token_id}
    assert hf_config(file)["bos_token_id"] is None


@pytest.mark.parametrize("token", ["a:b", "$x", "$B", "$", "$A", "two words", "</s>"])
def test_a_beginning_of_any_text_comes_once(token: str, file: GGUFFile) -> None:
    file.metadata |= BOTH | SOUND["llama"] | {"tokenizer.ggml.tokens": [*TOKENS[:2], token, *TOKENS[3:]]}
    file.metadata |= {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_space_prefix": False}
    assert load(file).encode("ab") == [2, 5]


def test_scores_that_give_no_order(file: GGUFFile) -> None:
    for scores in (np.full(6, np.nan, np.float32), np.zeros(5, np.float32)):
        file.metadata |= BOTH | SOUND["llama"] | {"tokenizer.ggml.scores": scores}
        with pytest.raises(ModelFileError, match="a score for each token"):
            load(file)


def test_tokens_that_would_take_all_memory(file: GGUFFile) -> None:
    """All parts of a text: each can be made in as many ways as it has places to cut."""
    file.tensors.pop("token_embd.weight")  # it has fewer rows
    text = "".join(chr(0x4E00 + i) for i in range(1100))
    parts = [text[i : i + n] for n in range(1, 70) for i in range(len(text) - n)]
    file.metadata |= BOTH | SOUND["llama"] | {"tokenizer.ggml.tokens": parts}
    file.metadata |= {"tokenizer.ggml.scores": np.zeros(len(parts), np.float32)}
    with pytest.raises(ModelFileError, match="its tokens merge in over 2,097,152 ways"):
        build_tokenizer(file)
    many = [f"{i:01024}" for i in range(17_000)]
    file.metadata |= {"tokenizer.ggml.tokens": many, "tokenizer.ggml.scores": np.zeros(17_000)}
    with pytest.raises(ModelFileError, match=r"tokens has over 16,777,216 characters"):
        build_tokenizer(file)


def test_one_reader_for_all() -> None:
    """Whoever read metadata past it would have to check the type himself, and one day would not."""
    folder = Path(ferrum_mlx.__file__).parent
    readers = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "metadata"
    }
    assert readers == {"gguf.py"}


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_a_header_is_read_once_in_a_load(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check of memory, the tokenizer, the config and the weights together."""
    pytest.importorskip(backend)
    read: list[Path] = []
    reader = gguf._HeaderReader

    def counted(data: mmap.mmap, path: Path) -> gguf._HeaderReader:
        read.append(path)
        return reader(data, path)

    monkeypatch.setattr(gguf, "_HeaderReader", counted)
    write_sentencepiece(tmp_path / "m.gguf")
    engine = build_engine(EngineConfig(model=str(tmp_path / "m.gguf"), backend=backend, device="cpu"))
    engine.shutdown()
    assert read == [tmp_path / "m.gguf"]
