"""Conversations as the text that a model was trained on; its own template, rendered in another process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ferrum_mlx import template_process
from ferrum_mlx.errors import FerrumError, UsageError, shown
from ferrum_mlx.messages import ChatMessage, ChatOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "ferrumprobe"


class ChatTemplate:
    """The chat template of one tokenizer.

    Messages go to it as they are: with `tool_calls`, a `tool_call_id`, or whatever else it reads.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self._hf = hf_tokenizer

    @property
    def text(self) -> str:
        """The template's source; that of all of them where there are several; "" without one."""
        source = self._hf.chat_template
        return "\n".join(source.values()) if isinstance(source, dict) else source or ""

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """The conversation up to where the answer begins, or goes on.

        Raises:
            UsageError: there is no template, or it refuses the conversation or the options.
            ModelFileError: the template is broken, or takes too much time or memory.
        """
        if not self.text:
            raise UsageError("this model has no chat template", next_step="use run --raw, or a chat model")
        if not messages:
            raise UsageError("the conversation is empty", "at least one message is needed")
        if options.tools and "tools" not in self.text:
            raise UsageError("this model's chat template takes no tools", next_step="use a model that does")
        if options.continue_last and not _can_go_on(messages[-1]):
            raise UsageError("there is no answer to continue", "the last message must be an assistant's text")
        plain = [self._with_plain_content(message) for message in messages]
        variables = self._variables(options)
        ending = "continue_final_message" if options.continue_last else "add_generation_prompt"
        return self._apply(plain, **{ending: True}, **variables)

    @cached_property
    def end_of_turn(self) -> str:
        """The text that begins right behind an answer; "" if nothing does, or no template is there."""
        try:
            text = self._apply([_message("user", "a"), _message("assistant", _MARK)])
        except FerrumError:  # it wants other conversations; then the model's files alone say what ends one
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a content may be a list of parts; other templates would print the list, or raise."""
        try:
            text = self._apply([_message("user", [{"type": "text", "text": _MARK}])])
        except FerrumError:  # see end_of_turn
            return False
        return _MARK in text and "'text'" not in text and '"text"' not in text

    def _apply(self, messages: list[ChatMessage], **variables: Any) -> str:
        try:
            template = self._hf.get_chat_template(None, variables.get("tools"))
        except ValueError as error:
            raise UsageError(f"the model's chat templates: {' '.join(str(error).split())}") from error
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return template_process.render(
            conversations=[said], chat_template=template, **(self._hf.special_tokens_map | variables)
        )

    def _variables(self, options: ChatOptions) -> dict[str, Any]:
        own = inspect.signature(self._hf.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
        own |= {"self", "messages", "conversations"}
        if taken := sorted(own & options.template_args.keys()):
            raise UsageError(
                f"template_args has {shown(taken[0])}",
                "allowed: variables of the chat template",
                "leave it away",
            )
        thinking = options.thinking
        switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        return {"tools": list(options.tools) or None, **switches, **options.template_args}

    def _with_plain_content(self, message: ChatMessage) -> ChatMessage:
        """Text parts joined by line breaks, as in vLLM, where the template takes no parts."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            return dict(message)
        texts = [_text_of(part) for part in content]
        return dict(message) if self._takes_parts else {**message, "content": "\n".join(texts)}


def _can_go_on(message: ChatMessage) -> bool:
    return message.get("role") == "assistant" and bool(message.get("content"))


def _message(role: str, content: object) -> ChatMessage:
    return {"role": role, "content": content}


def _text_of(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise UsageError(f"a content has a part {shown(kind)}", "allowed: {'type': 'text', 'text': text}")
