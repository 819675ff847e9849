"""A transformers tokenizer out of a GGUF's metadata; what cannot be built exactly is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ferrum_mlx.errors import ModelFileError, UnsupportedModelError, shown
from ferrum_mlx.gguf import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_AGAIN = "download it again or choose another"
_LONGEST = 1024  # characters of a token or merge; real ones have up to about 300
_MOST_TEXT = 16 << 20  # characters of a list
_MOST_MERGES = 2 << 20  # that are made here, of scores; trained vocabularies have a few for each token
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# words end where a small letter meets a capital one
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NO_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT = rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*|\p{{N}}|{_NO_WORDS}"
_GPT_4O_SPLIT = (
    rf"{_MARK}{_UPPER}*{_LOWER}+{_SUFFIX}|{_MARK}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}|{_NO_WORDS}"
)

# tokenizer.ggml.pre -> patterns, applied in order: each isolates its matches within what the last one left
_SPLITS = {
    "gpt-2": [_GPT2_SPLIT],
    "smollm": [r"\p{N}", _GPT2_SPLIT],
    "llama-bpe": [_LLAMA3_SPLIT],
    "llama-v3": [_LLAMA3_SPLIT],
    "llama3": [_LLAMA3_SPLIT],
    "dbrx": [_LLAMA3_SPLIT],  # of Phi-4, too
    "smaug-bpe": [_LLAMA3_SPLIT],
    "qwen2": [_QWEN2_SPLIT],
    "deepseek-r1-qwen": [_QWEN2_SPLIT],
    "tekken": [_TEKKEN_SPLIT],  # Mistral's
    "gpt-4o": [_GPT_4O_SPLIT],  # of Phi-4-mini, too
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"],
}
_ADDS_BOS = {"llama-bpe", "llama-v3", "llama3", "tekken"}  # where the file does not say
_WHOLE_WORDS_FIRST = _ADDS_BOS  # a piece that is a token stays whole, whatever the merges
_NFC = {"qwen2"}
_KEEP = {"<unk>", "<s>", "<|endoftext|>"}  # of Phi-3's added tokens, those that leave blanks alone


def build_tokenizer(gguf: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer, special tokens and chat template a GGUF describes.

    Raises:
        UnsupportedModelError: a kind or pre-tokenizer not known here.
        ModelFileError: lists that are missing or contradict each other.
    """
    from transformers import PreTrainedTokenizerFast

    kind = gguf.get("tokenizer.ggml.model", str)
    tokens = _texts(gguf, "tokens")
    if kind == "gpt2":
        backend = _byte_level(gguf, tokens)
    elif kind == "llama":
        backend = _sentencepiece(gguf, tokens)
    else:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer {shown(kind)}", "supported in GGUF: 'gpt2', 'llama'"
        )
    _add_tokens(gguf, tokens, backend)
    special = {
        f"{role}_token": token
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token := _special_token(gguf, tokens, key)) is not None
    }
    _add_bos_and_eos(gguf, backend, kind, special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=gguf.find("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = gguf.get("tokenizer.ggml.pre", str)
    if pre not in _SPLITS:
        supported = ", ".join(sorted(_SPLITS))
        raise UnsupportedModelError(
            f"{gguf.path}: pre-tokenizer {shown(pre)}",
            f"supported in GGUF: {supported}",
            "use the model's safetensors folder or hub repository",
        )
    merges = []
    for merge in _texts(gguf, "merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelFileError(f"{gguf.path}: {shown(merge)} is no merge of two tokens")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{gguf.path}: tokens and merges do not fit together: {error}") from error
    backend = Tokenizer(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose piece has the highest score merges first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = gguf.get("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(tokens) or np.isnan(scores).any():
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.scores does not give a score for each token")
    pairs = list(islice(_pairs(tokens, scores.tolist()), _MOST_MERGES + 1))
    if len(pairs) > _MOST_MERGES:
        raise ModelFileError(f"{gguf.path}: its tokens merge in over {_MOST_MERGES:,} ways", next_step=_AGAIN)
    merges = [(left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0])]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _special_token(gguf, tokens, "unknown")
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _pairs(tokens: list[str], scores: list[float]) -> Iterator[tuple[float, str, str]]:
    """Every two tokens that make a third, with its score, negated."""
    own = {token: token for token in tokens}  # millions of pairs name these texts, and copy none
    for token, score in zip(tokens, scores, strict=True):
        rank = -score
        for cut in range(1, len(token)):
            left, right = own.get(token[:cut]), own.get(token[cut:])
            if left is not None and right is not None:
                yield rank, left, right


def _add_tokens(gguf: GGUFFile, tokens: list[str], backend: Tokenizer) -> None:
    """Tokens that are matched whole in the text; the control ones are not shown."""
    from tokenizers import AddedToken

    types = gguf.get("tokenizer.ggml.token_type", np.ndarray, np.zeros(0))
    kinds = list(zip(tokens, types.tolist(), strict=False))
    hidden = [token for token, kind in kinds if kind in (_UNKNOWN, _CONTROL)]
    shown_too = [token for token, kind in kinds if kind == _USER_DEFINED]
    strips = _strips_what_follows(gguf)

    def added(token: str, special: bool) -> AddedToken:
        return AddedToken(token, normalized=False, special=special, rstrip=strips and token not in _KEEP)

    # all of a kind at once: each call builds the automaton that finds them anew
    backend.add_special_tokens([added(token, True) for token in hidden])
    backend.add_tokens([added(token, False) for token in shown_too])


def _strips_what_follows(gguf: GGUFFile) -> bool:
    """Phi-3's added tokens take the blanks behind them along. The file does not say so."""
    kind = gguf.get("tokenizer.ggml.model", str)
    return kind == "llama" and gguf.find("general.architecture", str) == "phi3"


def _add_bos_and_eos(gguf: GGUFFile, backend: Tokenizer, kind: str, special: dict[str, str]) -> None:
    from tokenizers import processors

    adds_bos = kind == "llama" or gguf.find("tokenizer.ggml.pre", str) in _ADDS_BOS
    wanted = {
        "bos_token": gguf.get("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "eos_token": gguf.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    put = {role: special[role] for role in wanted if wanted[role] and role in special}
    if put:
        # by their roles: in a token's own text "$" and ":" would mean something to the template
        template = [part for part in ("bos_token", "$A", "eos_token") if part == "$A" or part in put]
        special_tokens = [
            {"id": role, "ids": [backend.token_to_id(token)], "tokens": [token]}
            for role, token in put.items()
        ]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)


def _texts(gguf: GGUFFile, key: str) -> list[str]:
    values = gguf.get(f"tokenizer.ggml.{key}", list)
    if max(map(len, values), default=0) > _LONGEST:
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.{key} has an entry of over {_LONGEST} characters")
    if sum(map(len, values)) > _MOST_TEXT:
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.{key} has over {_MOST_TEXT:,} characters")
    if len(set(values)) != len(values):
        raise ModelFileError(f"{gguf.path}: tokenizer.ggml.{key} names an entry twice")
    rows = gguf.tensors.get("token_embd.weight")
    if key == "tokens" and rows is not None and len(values) > rows.shape[0]:
        raise ModelFileError(f"{gguf.path}: {len(values)} tokens, but embeddings for {rows.shape[0]}")
    return values


def _special_token(gguf: GGUFFile, tokens: list[str], key: str) -> str | None:
    name = f"tokenizer.ggml.{key}_token_id"
    token_id = gguf.find(name, int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelFileError(f"{gguf.path}: {name} is {token_id}", f"there are {len(tokens)} tokens")
    return tokens[token_id]
