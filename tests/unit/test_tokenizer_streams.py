"""Ids of real tokenizers to text: padding, special tokens, thinking tags; and bad words to ids."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import UsageError
from ferrum_mlx.output import OutputStream
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer

from .tiny_tokenizers import byte_level, sentencepiece_like

Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def tokenizer(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.finish()


MAKERS = [byte_level, sentencepiece_like]
THINK = ("[THINK]", "[/THINK]")


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=24))
def test_ids_that_a_padded_vocabulary_has_besides_are_no_text(make: Make, ids: list[int]) -> None:
    tokenizer = make(shown=["<tool>"])
    known = [token for token in ids if token < tokenizer.vocab_size]
    assert streamed(tokenizer, ids) == tokenizer.decode(known)


def test_the_default_model_s_padding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本 🎉")
    padded = [token for pair in zip(ids, itertools.repeat(60_000), strict=False) for token in pair]
    assert streamed(tokenizer, padded) == "日本 🎉"


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_thinking_and_answer_are_the_whole_decode(make: Make, data: st.DataObject) -> None:
    """Tags that are special tokens are seen; all other special tokens stay hidden."""
    tokenizer = make(special=THINK, shown=["<tool>"])
    first = len(tokenizer._hf) - 4  # <eos> and both tags, then <tool>
    ids = data.draw(st.lists(st.integers(0, first - 1) | st.integers(first, first + 3), max_size=20))
    opened = data.draw(st.booleans())
    prompt = tokenizer._hf.encode("user\n[THINK]\n" if opened else "user\n", add_special_tokens=False)
    out = OutputStream(
        Request("r", prompt, SamplingParams(ignore_eos=True), seed=0, max_tokens=100), tokenizer, 0.0, True
    )
    new = [*(out.add(token, 1.0) for token in ids), out.flush()]
    answer, thinking = "".join(part.text for part in new), "".join(part.thinking for part in new)
    shown = [token for token in ids if token != first]
    whole = tokenizer.decode(shown, skip_special_tokens=False)
    opening = r"(\s{0,64}\[THINK\]\n*)" + ("?" if opened else "")
    parts = re.fullmatch(rf"(?s){opening}\n*(.*?)(?:(\[/THINK\]\n*)(.*))?", whole)
    expected = (whole, "") if parts is None else (parts[4] or "", parts[2])
    assert (answer, thinking) == expected


@pytest.mark.parametrize("make", MAKERS)
def test_tags_of_special_tokens_are_hidden_in_a_bare_completion(make: Make) -> None:
    tokenizer = make(special=THINK)
    ids = tokenizer._hf.encode("[THINK]a[/THINK]b", add_special_tokens=False)
    assert "[THINK]" not in streamed(tokenizer, ids)
    with_tags = tokenizer.detokenizer(with_tags=True)
    assert "[/THINK]" in "".join(map(with_tags.add, ids)) + with_tags.finish()


def test_a_model_without_thinking_may_speak_of_tags(tokenizer: Tokenizer) -> None:
    splitter = tokenizer.splitter(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    assert splitter.feed("<think>a</think>b") == ("<think>a</think>b", "")


def test_bad_words_are_found_in_front_and_behind_a_space(tokenizer: Tokenizer) -> None:
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    assert tokenizer.encode_words(["cat"]) == (tuple(encode("cat")), tuple(encode(" cat")))
    assert tokenizer.encode_words([" cat"]) == tokenizer.encode_words(["cat"])
    two = tokenizer.encode_words(["cat", "!?"])
    assert two[:2] == tokenizer.encode_words(["cat"])
    spelled = byte_level().encode_words(["cat"])  # the space is a token of its own: nothing to add
    assert [len(word) for word in spelled] == [3]
    with pytest.raises(UsageError, match="bad_words has ' '"):
        tokenizer.encode_words(["a", " "])
