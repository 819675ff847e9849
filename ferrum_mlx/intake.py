"""A request's way in: text to ids, and everything that is checked before it may wait."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeGuard

from ferrum_mlx.config import check_adapter
from ferrum_mlx.errors import ContextLengthError, UsageError, shown
from ferrum_mlx.messages import ChatMessage, ChatOptions, Prompt, Submit
from ferrum_mlx.output import OutputStream, TextCodec, end_ids
from ferrum_mlx.plain import wholes
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import check_vocab


class Intake:
    """`kv_capacity` is the most tokens a request can hold; `adapters` are the names it may choose from."""

    def __init__(
        self, codec: TextCodec, vocab_size: int, kv_capacity: int, adapters: Sequence[str] = ()
    ) -> None:
        self._codec, self._vocab_size, self._kv_capacity = codec, vocab_size, kv_capacity
        self._adapters = adapters

    def take(self, command: Submit, arrived: float) -> OutputStream:
        """The request, with its way out.

        Raises:
            FerrumError: it can never run as it is; a codec may raise anything else.
        """
        params = command.params
        if not isinstance(command.priority, int):
            raise UsageError(
                f"priority is {shown(command.priority)}", "allowed: a whole number, a lower one goes first"
            )
        adapter = check_adapter(command.adapter, self._adapters)
        prompt = self._encode(command.prompt, command.chat)
        room = self._kv_capacity - len(prompt)
        if not prompt or room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens",
                f"allowed: 1 to {self._kv_capacity - 1} at this context",
                "shorten it, or raise --max-model-len or --kv-memory" if prompt else "type something",
            )
        request = Request(
            request_id=command.request_id,
            prompt=prompt,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=min(params.max_tokens or room, room),
            priority=command.priority,
            sample_index=command.sample_index,
            adapter=adapter,
            end_ids=tuple(sorted(end_ids(params, self._codec))),
            bad_sequences=self._codec.encode_words(params.bad_words) if params.bad_words else (),
        )
        check_vocab(params, self._vocab_size, request.end_ids, request.bad_sequences)
        return OutputStream(request, self._codec, arrived, is_chat=_is_conversation(command.prompt))

    def count(self, prompt: Prompt, chat: ChatOptions) -> int:
        """The tokens of a prompt, with all that the template adds to a conversation.

        Raises:
            FerrumError: it is none; a codec may raise anything else.
        """
        return len(self._encode(prompt, chat))

    def _encode(self, prompt: Prompt, chat: ChatOptions) -> list[int]:
        if isinstance(prompt, str):
            return self._codec.encode(prompt)
        if _is_conversation(prompt):
            return self._codec.encode_chat(prompt, chat)
        ids = wholes(prompt)
        if ids is None or not all(0 <= token < self._vocab_size for token in ids):
            raise UsageError(
                "the prompt's token ids are not all ids",
                f"allowed: whole numbers from 0 to {self._vocab_size - 1}",
            )
        return ids


def _is_conversation(prompt: Prompt) -> TypeGuard[list[ChatMessage]]:
    return not isinstance(prompt, str) and all(isinstance(part, dict) for part in prompt)
