"""Tokenizers made on the spot: bytes for a vocabulary, and whatever tokens and template a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ferrum_mlx.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(
    special: Sequence[str] = (), shown: Sequence[str] = (), template: str | None = CHATML, eos: str = "<eos>"
) -> Tokenizer:
    """GPT-2's kind: a token a byte, then `special` ones that are not shown, then `shown` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend, special, shown, template, eos)


def sentencepiece_like(
    special: Sequence[str] = (), shown: Sequence[str] = (), template: str | None = CHATML, eos: str = "<eos>"
) -> Tokenizer:
    """Llama 2's kind: letters, a mark for spaces, and a token a byte for all other characters."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz/#\n"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return _wrapped(backend, special, shown, template, eos)


def _wrapped(
    backend: Backend, special: Sequence[str], shown: Sequence[str], template: str | None, eos: str
) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True) for token in (eos, *special)])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in shown])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, clean_up_tokenization_spaces=False, chat_template=template
    )
    return Tokenizer(hf)
