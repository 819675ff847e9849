"""What a user may hand to LLM, checked and brought into one form. UsageError says what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ferrum_mlx.config import check_adapter
from ferrum_mlx.errors import UsageError, shown
from ferrum_mlx.messages import ChatMessage, ChatOptions, Prompt
from ferrum_mlx.plain import wholes
from ferrum_mlx.sampling import SamplingParams

TextPrompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Conversations = Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]]
Adapters = str | Sequence[str | None] | None
Params = SamplingParams | Sequence[SamplingParams] | None


class ChatSettings(TypedDict, total=False):
    """How `chat` and `achat` fill the chat template; see ChatOptions."""

    tools: Sequence[dict[str, Any]]
    thinking: bool | None
    template_args: Mapping[str, Any]


def as_prompts(prompts: TextPrompts) -> list[Prompt]:
    """One text or list of ids, or a list of these, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise UsageError(
            f"prompts is {shown(prompts)}", "allowed: a text, a list of token ids, or a list of these"
        )
    if prompts and (ids := wholes(prompts)) is not None:
        return [ids]
    return [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]


def _token_ids(prompt: object) -> Prompt:
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and (ids := wholes(prompt)) is not None:
        return ids
    raise UsageError(f"a prompt is {shown(prompt)}", "allowed: a text, or a list of token ids")


def as_conversations(conversations: Conversations) -> list[Prompt]:
    """One conversation, or a list of them, as a list."""
    if not isinstance(conversations, Sequence):
        raise UsageError(
            f"conversations is {shown(conversations)}", "allowed: a list of messages, or a list of such"
        )
    single = bool(conversations) and all(isinstance(part, dict) for part in conversations)
    return [_messages(conversation) for conversation in ([conversations] if single else conversations)]


def _messages(conversation: object) -> Prompt:
    if isinstance(conversation, Sequence):
        messages = [part for part in conversation if isinstance(part, dict)]
        if len(messages) == len(conversation):
            return messages
    raise UsageError(
        f"a conversation is {shown(conversation)}", 'allowed: a list of {"role": ..., "content": ...}'
    )


def chat_options(settings: ChatSettings) -> ChatOptions:
    """How all conversations of a call are templated."""
    known = ChatSettings.__annotations__
    if unknown := sorted(settings.keys() - known.keys()):
        raise UsageError(
            f"chat got the setting {shown(unknown[0])}",
            f"allowed: {', '.join(sorted(known))}",
            "a template's own variables go into template_args",
        )
    if settings.get("thinking") not in (None, True, False):
        raise UsageError(f"thinking is {shown(settings.get('thinking'))}", "allowed: True, False or None")
    tools, template_args = settings.get("tools", ()), settings.get("template_args", {})
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"tools is {shown(tools)}", "allowed: a list of JSON schemas, as dicts")
    if not isinstance(template_args, Mapping):
        raise UsageError(
            f"template_args is {shown(template_args)}", "allowed: a dict of the template's variables"
        )
    return ChatOptions(tuple(tools), settings.get("thinking"), dict(template_args))


def with_params(prompts: list[Prompt], params: Params) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in prompts]
    if isinstance(params, dict) or not all(isinstance(each, SamplingParams) for each in params):
        raise UsageError(
            f"params is {shown(params)}", "allowed: SamplingParams, one for all prompts or one each"
        )
    if len(params) != len(prompts):
        raise UsageError(
            f"there are {len(params)} params for {len(prompts)} prompts", "allowed: one, or one each"
        )
    return list(zip(prompts, params, strict=True))


def adapters_of(prompts: list[Prompt], adapter: Adapters, loaded: Sequence[str]) -> list[str]:
    """The LoRA adapter of each prompt by name; "" is none."""
    if adapter is None or isinstance(adapter, str):
        return [check_adapter(adapter, loaded)] * len(prompts)
    if not isinstance(adapter, Sequence):
        raise UsageError(f"adapter is {shown(adapter)}", "allowed: a name, one for all prompts or one each")
    if len(adapter) != len(prompts):
        raise UsageError(
            f"there are {len(adapter)} adapters for {len(prompts)} prompts", "allowed: one, or one each"
        )
    return [check_adapter(name, loaded) for name in adapter]
