"""Text to ids and back: GGUF tokenizers against llama.cpp's ids, SentencePiece's, and the folder's own."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, UsageError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_tokenizer import build_tokenizer
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "data/llama_cpp_ids.json").read_text(encoding="utf-8"))
UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # SmolLM2 has no tokens for these
CHAT = [{"role": "user", "content": "Hello 🎉"}]


@pytest.fixture(scope="module")
def gguf(smollm2: ResolvedModel) -> GGUFFile:
    return GGUFFile(smollm2.path)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


def changed(gguf: GGUFFile, **changes: Any) -> Tokenizer:
    """A tokenizer of the same file with other metadata; None removes a key."""
    other = GGUFFile(gguf.path)
    other.metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    other.metadata = {key: value for key, value in other.metadata.items() if value is not None}
    return Tokenizer(build_tokenizer(other))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.finish()


def test_the_default_models_ids_equal_llama_cpps(tokenizer: Tokenizer) -> None:
    ours = [tokenizer.encode(text) for text in GOLDEN["texts"]]
    assert ours == GOLDEN["ids"]["smollm"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "default"])
def test_pre_tokenizers_equal_llama_cpps(pre: str, gguf: GGUFFile) -> None:
    other = changed(gguf, ggml__pre=pre)
    differing = {
        text
        for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][pre], strict=True)
        if other.encode(text, add_special_tokens=False) != ids
    }
    # Qwen2's own tokenizer composes characters first (NFC), llama.cpp does not
    assert differing == ({"e\u0301 combining café"} if pre == "qwen2" else set())
    assert any(GOLDEN["ids"][pre][i] != ids for i, ids in enumerate(GOLDEN["ids"]["smollm"]))


SPLITS = json.loads((Path(__file__).parent / "data/llama_cpp_splits.json").read_text(encoding="utf-8"))
COMPOSED = {"e\u0301 combining café", "é combining e\u0301 n\u0303o"}
CASED = {"e\u0301 combining café", "हिन्दी में", "ÀÉîöÜber ÜBER straße ΑΒΓαβγ"}
# the models' own tokenizers compose characters, count marks as of words and know the case of all letters
DIFFERING = {"qwen2": COMPOSED, "tekken": CASED, "gpt-4o": CASED}


@pytest.mark.parametrize("pre", SPLITS["ids"])
def test_every_split_is_llama_cpps(pre: str, gguf: GGUFFile) -> None:
    texts = GOLDEN["texts"] + SPLITS["more_texts"]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pairs: dict[str, str] = {}
    for text in texts:
        for piece, _ in alphabet.pre_tokenize_str(text):
            pairs |= {left + right: f"{left} {right}" for left, right in pairwise(piece)}
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(alphabet.alphabet()), *pairs]
    tokenizer = changed(
        gguf,
        ggml__pre=pre,
        ggml__tokens=tokens,
        ggml__merges=list(pairs.values()),
        ggml__token_type=np.array([3] * 4 + [1] * (len(tokens) - 4)),
    )
    differing = {
        text
        for text, ids in zip(texts, SPLITS["ids"][pre], strict=True)
        if tokenizer.encode(text, add_special_tokens=False) != ids
    }
    assert differing == DIFFERING.get(pre, set())


def test_llama3_takes_a_whole_word_though_no_merges_lead_to_it(gguf: GGUFFile) -> None:
    word = "the"
    assert len(changed(gguf, ggml__pre="gpt-2", ggml__merges=["t h"]).encode(word)) == 2
    whole = changed(gguf, ggml__pre="llama-bpe", ggml__merges=["t h"], ggml__add_bos_token=False)
    assert whole.encode(word) == [gguf.metadata["tokenizer.ggml.tokens"].index(word)]


def test_facts_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.encode("1234")) == 4  # digit by digit, and no BOS
    text = tokenizer.decode(tokenizer.encode_chat(CHAT), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello 🎉<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_ids_equal_the_ids_of_the_rendered_text(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "  two  spaces\n"},
    ]
    ids = tokenizer.encode_chat(messages)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert "Be brief." in text
    assert "  two  spaces\n<|im_end|>" in text


def test_bos_comes_once(gguf: GGUFFile) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with_bos = changed(gguf, ggml__add_bos_token=True, chat_template=template)
    assert with_bos.encode("a")[0] == 1
    assert with_bos.encode("a", add_special_tokens=False)[0] != 1
    assert with_bos.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1


def test_bos_where_the_file_does_not_say(gguf: GGUFFile) -> None:
    assert changed(gguf, ggml__add_bos_token=None).encode("a").count(1) == 0
    assert changed(gguf, ggml__add_bos_token=None, ggml__pre="llama-bpe").encode("a").count(1) == 1


def test_conversations_that_cannot_be(gguf: GGUFFile, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        changed(gguf, chat_template=None).encode_chat(CHAT)
    with pytest.raises(UsageError, match="empty"):
        tokenizer.encode_chat([])
    refusing = changed(gguf, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        refusing.encode_chat(CHAT)
    with pytest.raises(UsageError, match="template refuses"):
        tokenizer.encode_chat([{"role": "user"}])


def test_text_in_another_encoding_is_a_clear_error(tokenizer: Tokenizer) -> None:
    text = b"caf\xe9".decode(errors="surrogateescape")
    with pytest.raises(UsageError, match=r"no UTF-8 at character 3"):
        tokenizer.encode(text)
    with pytest.raises(UsageError, match=r"no UTF-8"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_a_long_text_brings_no_warning(tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(tokenizer.encode("a b " * 10000)) > 8192
    assert capfd.readouterr().err == ""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_text_survives_and_streams(text: str, tokenizer: Tokenizer) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    if not set(text.encode()) & UNKNOWN_BYTES:
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=20))
def test_any_ids_stream_as_they_decode(ids: list[int], tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [1, *tokenizer.encode("a b"), 2]) == "a b"


def test_added_tokens_that_are_not_special_are_shown(gguf: GGUFFile) -> None:
    types = np.array(gguf.metadata["tokenizer.ggml.token_type"])
    types[9] = 4  # <issue_comment> as an ordinary token that is matched whole
    other = changed(gguf, ggml__token_type=types)
    ids = other.encode("a <issue_comment>é")
    assert 9 in ids
    assert streamed(other, ids) == other.decode(ids) == "a <issue_comment>é"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml__pre": "bloom"}, "'bloom'.*smollm"),
        ({"ggml__model": "t5"}, "'t5'"),
    ],
)
def test_unknown_kinds_are_refused_by_name(changes: dict[str, str], named: str, gguf: GGUFFile) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        changed(gguf, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ggml__tokens": None},
        {"ggml__tokens": ["a", "a"]},
        {"ggml__tokens": [f"t{i}" for i in range(49153)]},
        {"ggml__merges": ["nospace"]},
        {"ggml__merges": ["not there"]},
        {"ggml__eos_token_id": 49152},
        {"ggml__pre": None},
    ],
)
def test_lists_that_contradict_each_other(changes: dict[str, Any], gguf: GGUFFile) -> None:
    with pytest.raises(ModelFileError):
        changed(gguf, **changes)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A small BPE model as Llama 2's makers train them."""
    corpus = tmp_path_factory.mktemp("spm") / "corpus.txt"
    texts = (Path(__file__).parents[2] / "ferrum_mlx").rglob("*.py")
    corpus.write_text("\n".join(path.read_text() for path in texts) + "日本語の文章 Привет é ü\n" * 5)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_tokenizer(
    spm: sentencepiece.SentencePieceProcessor, path: Path, write: Callable[..., Any]
) -> Tokenizer:
    write(path)
    gguf = GGUFFile(path)
    ids = range(spm.get_piece_size())
    types = [2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1 for i in ids]
    gguf.tensors.clear()  # the tiny model has fewer embeddings
    gguf.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([spm.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Tokenizer(build_tokenizer(gguf))


def test_sentencepiece_models_equal_sentencepiece(
    spm: sentencepiece.SentencePieceProcessor, tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    tokenizer = spm_tokenizer(spm, tmp_path / "m.gguf", write_gguf)
    rng = random.Random(5)
    alphabet = "aB z09 \n\t.,'!_é日本🎉½²Ж \r/$=▁self.return"
    for _ in range(1500):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == spm.encode(text)
        assert tokenizer.decode(ids) == spm.decode(ids)
        assert tokenizer.encode(text) == [1, *ids]
        noise = [rng.randrange(spm.get_piece_size()) for _ in range(rng.randrange(12))]
        for sequence in (ids, noise, [rng.randrange(3, 259) for _ in range(rng.randrange(8))]):
            assert streamed(tokenizer, sequence) == tokenizer.decode(sequence)


PHI3_TOKENS = {  # token -> its kind in tokenizer.ggml.token_type
    **dict.fromkeys(["<unk>"], 2),
    **dict.fromkeys(["<s>", "</s>"], 3),
    **{f"<0x{byte:02X}>": 6 for byte in range(256)},
    **dict.fromkeys(["▁", *"abcdefgh", "▁a", "▁b", "ab", "▁ab", "▁▁"], 1),
    **dict.fromkeys(["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"], 3),
    "<tag>": 4,
}
# text -> llama.cpp's ids in a model called Phi-3, and in another; of xllamacpp 2026.10.11549
BLANKS_BEHIND = {
    "<|user|>\nab a<|end|>\n<|assistant|>\n": (
        [275, 271, 268, 276, 274],
        [275, 259, 13, 270, 268, 276, 259, 13, 274, 259, 13],
    ),
    "<|user|> \n\t ab<|end|> <|user|>": ([275, 271, 276, 275], [275, 272, 13, 12, 271, 276, 272, 275]),
    "<tag>  ab<tag>ab": ([277, 271, 277, 271], [277, 272, 271, 277, 271]),
    "b ab</s>  ab": ([269, 271, 2, 271], [269, 271, 2, 272, 271]),
    "<|endoftext|>\n ab": ([273, 259, 13, 271], [273, 259, 13, 271]),
    "<unk> a": ([0, 259, 268], [0, 259, 268]),
}


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_phi3s_added_tokens_take_the_blanks_behind_them(
    architecture: str, tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    write_gguf(tmp_path / "m.gguf")
    gguf = GGUFFile(tmp_path / "m.gguf")
    gguf.tensors.clear()  # the tiny model has fewer embeddings
    gguf.metadata |= {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(PHI3_TOKENS),
        "tokenizer.ggml.scores": np.array([-100.0] * 268 + [-1.0, -2.0, -3.0, -4.0, -5.0] + [-1000.0] * 5),
        "tokenizer.ggml.token_type": np.array(list(PHI3_TOKENS.values())),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = Tokenizer(build_tokenizer(gguf))
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in BLANKS_BEHIND}
    assert found == {text: ids[architecture != "phi3"] for text, ids in BLANKS_BEHIND.items()}


@pytest.fixture
def folder(tmp_path: Path, gguf: GGUFFile) -> Path:
    """The default model's tokenizer as a checkpoint's folder."""
    build_tokenizer(gguf).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    return tmp_path


def load_folder(path: Path) -> Tokenizer:
    return load_tokenizer(ResolvedModel(name="f", path=path, format="safetensors"))


def test_a_folder_gives_the_same_ids(folder: Path, tokenizer: Tokenizer) -> None:
    loaded = load_folder(folder)
    assert [loaded.encode(text) for text in GOLDEN["texts"]] == GOLDEN["ids"]["smollm"]
    assert loaded.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_eos_is_the_union_of_all_that_name_one(folder: Path, tokenizer: Tokenizer) -> None:
    assert load_folder(folder).eos_token_ids == {2, 5, 7}
    (folder / "generation_config.json").unlink()
    assert load_folder(folder).eos_token_ids == {2, 5}
    (folder / "config.json").unlink()
    assert load_folder(folder).eos_token_ids == tokenizer.eos_token_ids


def test_broken_tokenizer_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ModelFileError, match="generation_config"):
        load_folder(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="tokenizer"):
        load_folder(folder)


def test_eos_of_a_folder_is_no_less_than_mlx_lm_s(folder: Path) -> None:
    from mlx_lm.tokenizer_utils import load
    from mlx_lm.utils import load_config

    theirs = load(folder, eos_token_ids=load_config(folder)["eos_token_id"]).eos_token_ids
    assert theirs == {2, 5, 7}
    assert load_folder(folder).eos_token_ids == theirs


def test_eos_of_a_model_inside_another(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [9]}}))
    assert load_folder(folder).eos_token_ids == {2, 5, 7, 9}


def test_a_chat_template_s_end_of_turn_counts_where_the_files_name_none(gguf: GGUFFile) -> None:
    other = GGUFFile(gguf.path)
    del other.metadata["tokenizer.ggml.eos_token_id"]
    assert Tokenizer(build_tokenizer(other)).eos_token_ids == {2}
