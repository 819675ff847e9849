"""Text to token ids and back, from a checkpoint's folder or out of a GGUF's metadata.

transformers does the work (chat templates included) and is imported only when a tokenizer is loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ferrum_mlx import template_process
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.chat_template import ChatTemplate
from ferrum_mlx.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from ferrum_mlx.errors import ModelFileError, UsageError, one_line, shown
from ferrum_mlx.messages import ChatMessage, ChatOptions
from ferrum_mlx.thinking import Splitter, ThinkingFormat, Unsplit, find_format
from ferrum_mlx.tokenizer_folder import folder_eos, from_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AS_IS = ChatOptions()
_PROMPT_END = 32  # tokens that hold an opening tag, should the template end with one


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        eos_token_ids: ids that end a generation: the tokenizer's, generation_config's, config's and the
            chat template's together.
        vocab_size: ids it knows, added tokens included.
        has_chat_template: whether encode_chat works.
    """

    def __init__(
        self, hf_tokenizer: PreTrainedTokenizerBase, extra_eos: frozenset[int] = frozenset()
    ) -> None:
        self._hf = hf_tokenizer
        hf_tokenizer.model_max_length = sys.maxsize  # what is too long is refused elsewhere, with numbers
        self._template = ChatTemplate(hf_tokenizer)
        self._bytes_of: dict[int, bytes] = {}
        self.has_chat_template = bool(self._template.text)
        self.vocab_size = len(hf_tokenizer)
        own = hf_tokenizer.eos_token_id
        self.eos_token_ids = extra_eos | self._end_of_turn() | (frozenset() if own is None else {own})

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id."""
        return self._hf.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text; add_special_tokens puts BOS before it where the model wants one.

        A text that begins with BOS, because it was templated already, gets no second one.

        Raises:
            UsageError: the text is no Unicode (bytes of another encoding came in).
        """
        _check_unicode(text)
        bos = self._hf.bos_token
        if isinstance(bos, str) and bos and text.startswith(bos):
            add_special_tokens = False
        return self._ids(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = _AS_IS) -> list[int]:
        """Ids of a conversation, [{"role": ..., "content": ...}], up to where the answer begins.

        Contents are texts, or lists of {"type": "text", "text": ...}.

        Raises:
            UsageError: the model has no chat template, or its template refuses the conversation.
        """
        text = self._template.render(messages, options)
        _check_unicode(text)
        return self._ids(text, False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, no Exception: a pattern that gives up
                raise
            raise ModelFileError(
                f"the model's tokenizer cannot take this text: {one_line(error)}",
                next_step="try another model",
            ) from error

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Id sequences that spell the words, each at the beginning of a text and, as in vLLM, behind a
        space where that makes as many tokens with another first one.

        Raises:
            UsageError: a word without tokens.
        """
        found = []
        for word in words:
            bare, spaced = (
                tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            if not bare:
                raise UsageError(f"bad_words has {shown(word)}", "allowed: texts that have tokens")
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return tuple(found)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def detokenizer(self, *, with_tags: bool = False) -> Detokenizer:
        """A fresh one for one generation; special tokens are not shown, but for those a splitter needs."""
        hidden = self._special_ids - self._tag_ids if with_tags else self._special_ids
        if self._is_byte_level:
            return ByteLevelDetokenizer(lambda token: b"" if token in hidden else self._token_bytes(token))
        known = self._known_ids
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            lambda token: token in hidden or token not in known,
            self._byte_ids,
        )

    def splitter(self, prompt: Sequence[int]) -> Splitter:
        """A fresh one for the answer to a templated prompt; without a thinking format, all is answer."""
        if self._thinking is None:
            return Unsplit()
        return self._thinking.splitter(self.decode(prompt[-_PROMPT_END:], skip_special_tokens=False))

    def _end_of_turn(self) -> frozenset[int]:
        """The added token with which the chat template ends an answer: some models' files name only
        the end of a text.

        None where text follows it, or where it ends thinking, too: that is no end of a turn.
        """
        text = self._template.end_of_turn.strip() if self.has_chat_template else ""
        added = {token.content: i for i, token in self._hf.added_tokens_decoder.items() if token.content}
        found: list[int] = []
        while text:
            token = max(filter(text.startswith, added), key=len, default="")
            if not token:
                return frozenset()
            found.append(added[token])
            text = text.removeprefix(token).lstrip()
        return frozenset(found[:1]) - self._tag_ids

    @cached_property
    def _thinking(self) -> ThinkingFormat | None:
        return find_format(self._hf.get_vocab(), self._template.text)

    @cached_property
    def _tag_ids(self) -> frozenset[int]:
        vocab = self._hf.get_vocab()
        tokens = () if self._thinking is None else self._thinking.tokens
        return frozenset(vocab[token] for token in tokens if token in vocab)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._hf.added_tokens_decoder.items() if token.special)

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        """Without the rows that pad a vocabulary: a model may sample them, a decoder may raise."""
        return frozenset(self._hf.get_vocab().values())

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        vocab = self._hf.get_vocab().items()
        return frozenset(i for token, i in vocab if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token))

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._hf, "backend_tokenizer", None)
        return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's alphabet: a printable byte stands for itself, the others for code points from 256 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = {chr(byte): byte for byte in printable}
        return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._hf.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):  # a row of a padded vocabulary
            return b""
        if all(char in self._byte_of_char for char in token):
            return bytes(self._byte_of_char[char] for char in token)
        return token.encode()  # an added token is spelled as it is


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is no UTF-8 at character {error.start}: {text[error.start]!r}",
            next_step="convert it to UTF-8",
        ) from error


def load_tokenizer(resolved: ResolvedModel) -> Tokenizer:
    """The tokenizer of a resolved model.

    Raises:
        ModelFileError: tokenizer files are missing or broken.
        UnsupportedModelError: a GGUF whose kind of tokenizer we cannot build exactly.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would ask for torch, not needed here
    template_process.start()  # a second's work, done beside ours
    if resolved.format == "gguf":
        from ferrum_mlx.gguf_config import eos_token_ids
        from ferrum_mlx.gguf_tokenizer import build_tokenizer

        return Tokenizer(build_tokenizer(resolved.gguf), frozenset(eos_token_ids(resolved.gguf)))
    return Tokenizer(from_folder(resolved.path), folder_eos(resolved.path))
