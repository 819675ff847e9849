"""A fake model behind a real tokenizer and template: it answers in letters, and ends its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrum_mlx.backends.fake import EOS, FakeExecutor, hashed
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine

from .tiny_tokenizers import byte_level

BLOCK = 16
ANSWER = 40  # tokens, without the end of the turn


def build_chat(config: EngineConfig, narrate: Callable[[str], None]) -> Engine:
    """In place of build.build_engine. An answer depends on every token of the conversation before it."""
    codec = byte_level(special=["<|im_start|>"], eos="<|im_end|>")
    assert codec.eos_token_ids == {EOS}
    ids = {code: codec.encode(chr(code))[0] for code in b"abcdefghijklmnopqrstuvwxyz "}

    def say(tokens: Sequence[int], sampling: RowSampling) -> int:
        return ids[hashed(tokens, sampling)] if sampling.position < ANSWER else EOS

    executor = FakeExecutor(config, say)
    executor.prepare_startup()
    return Engine(executor, codec, config, backend="fake", backend_reason="a test")
