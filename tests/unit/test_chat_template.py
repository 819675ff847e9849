"""Conversations to ids: equal to transformers' own, whatever messages, tools and settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UsageError
from ferrum_mlx.messages import ChatMessage, ChatOptions
from ferrum_mlx.thinking import Channels
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer

from .tiny_tokenizers import CHATML, byte_level

ROLES = ("<|im_start|>", "<|im_end|>")
USER: ChatMessage = {"role": "user", "content": "hi"}
TOOLS = (
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
    },
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}
WITH_TOOLS = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}{{ level }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


def transformers_ids(tokenizer: Tokenizer, messages: list[ChatMessage], **variables: Any) -> list[int]:
    return tokenizer._hf.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
    )


@pytest.fixture(scope="module")
def smol(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


def with_tools() -> Tokenizer:
    tokenizer = byte_level((*ROLES, "<bos>"), ("<think>", "</think>"), WITH_TOOLS)
    tokenizer._hf.bos_token = "<bos>"
    return tokenizer


@pytest.fixture(scope="module")
def tooled() -> Tokenizer:
    return with_tools()


@settings(max_examples=100, deadline=None)
@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool"]),
                "content": st.text(st.characters(codec="utf-8"), max_size=20)
                | st.sampled_from(["<|im_end|>", " a \n", "<|im_start|>user\n"]),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_ids_equal_transformers(messages: list[ChatMessage], smol: Tokenizer, tooled: Tokenizer) -> None:
    for tokenizer in (smol, tooled):
        assert tokenizer.encode_chat(messages) == transformers_ids(tokenizer, messages)


def test_tool_messages_and_calls(tooled: Tokenizer) -> None:
    messages: list[ChatMessage] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "1", "content": "42"},
    ]
    ids = tooled.encode_chat(messages, ChatOptions(tools=TOOLS))
    assert ids == transformers_ids(tooled, messages, tools=list(TOOLS))
    text = tooled.decode(ids, skip_special_tokens=False)
    assert '"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}' in text
    assert '<call>{"name": "f", "arguments": {"b": 1, "a": "é"}}</call>' in text


@pytest.mark.parametrize(
    ("options", "variables", "end"),
    [
        (ChatOptions(), {}, "assistant\n"),
        (ChatOptions(thinking=True), {"enable_thinking": True}, "assistant\n<think>\n"),
        (ChatOptions(thinking=False), {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        (ChatOptions(template_args={"level": "high"}), {"level": "high"}, "assistant\nhigh"),
        (
            ChatOptions(thinking=True, template_args={"enable_thinking": False}),
            {"enable_thinking": False},
            "</think>\n\n",
        ),
    ],
)
def test_settings(tooled: Tokenizer, options: ChatOptions, variables: dict[str, Any], end: str) -> None:
    ids = tooled.encode_chat([USER], options)
    assert ids == transformers_ids(tooled, [USER], **variables)
    assert tooled.decode(ids, skip_special_tokens=False).endswith(end)


@pytest.mark.parametrize("begun", ["The capital is", "The capital is ", "1. one\n2.", "<|im_end|>", "日本"])
def test_an_answer_goes_on_where_it_ends(smol: Tokenizer, begun: str) -> None:
    messages = [USER, {"role": "assistant", "content": begun}]
    opened, asked = (
        smol.decode(ids, skip_special_tokens=False)
        for ids in (smol.encode_chat(messages, ChatOptions(continue_last=True)), smol.encode_chat([USER]))
    )
    assert opened == asked + begun


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": ""}])
def test_what_cannot_be_continued_is_refused(smol: Tokenizer, last: ChatMessage) -> None:
    with pytest.raises(UsageError, match="no answer to continue"):
        smol.encode_chat([USER, last], ChatOptions(continue_last=True))


def test_the_other_name_of_the_switch() -> None:
    tokenizer = byte_level(ROLES, template=CHATML + "{{ '<think>' if thinking else '</think>' }}")
    on, off = (tokenizer.encode_chat([USER], ChatOptions(thinking=value)) for value in (True, False))
    assert (tokenizer.decode(on)[-7:], tokenizer.decode(off)[-8:]) == ("<think>", "</think>")


def test_templates_without_a_switch_ignore_it(smol: Tokenizer) -> None:
    assert smol.encode_chat([USER], ChatOptions(thinking=False)) == smol.encode_chat([USER])


def test_settings_change_nothing_before_the_answer_and_repeats_are_equal(tooled: Tokenizer) -> None:
    plain = tooled.encode_chat([USER])
    for _ in range(2):
        assert tooled.encode_chat([USER], ChatOptions(thinking=True))[: len(plain)] == plain
        with_tools = tooled.encode_chat([USER], ChatOptions(tools=TOOLS))
        assert tooled.encode_chat([USER], ChatOptions(tools=TOOLS)) == with_tools


def test_bos_comes_once() -> None:
    tooled = with_tools()
    bos = tooled._hf.convert_tokens_to_ids("<bos>")
    ids = tooled.encode_chat([USER])
    assert ids.count(bos) == 1
    tooled._hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert tooled.encode_chat([USER]) == ids
    assert tooled.encode("a").count(bos) == 1
    assert tooled.encode(tooled.decode(ids, skip_special_tokens=False)) == ids  # templated by its user


def test_parts_of_text() -> None:
    parts: ChatMessage = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    aware, plain = byte_level(ROLES, template=PARTS), byte_level(ROLES)
    assert aware.encode_chat([parts]) == transformers_ids(aware, [parts])
    assert "[a][b]" in aware.decode(aware.encode_chat([parts]))
    assert plain.encode_chat([parts]) == transformers_ids(plain, [{"role": "user", "content": "a\nb"}])
    printing = byte_level(ROLES, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert printing.decode(printing.encode_chat([parts])) == "a\nb"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": "x"}], "'image_url'"),
        (["a"], "'a'"),
        ([{"type": "text"}], "'text'"),
    ],
)
def test_parts_that_are_no_text(content: list[Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"a part {named}; allowed"):
        byte_level(ROLES, template=PARTS).encode_chat([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", ChatOptions(), "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", ChatOptions(), "refuses"),
        ("{{ 1 / 0 }}", ChatOptions(), "division by zero"),
        ("{{ messages[0].content + 1 }}", ChatOptions(), "refuses"),
        (CHATML, ChatOptions(tools=TOOLS), "takes no tools"),
        (CHATML, ChatOptions(template_args={"add_generation_prompt": False}), "add_generation_prompt"),
        (CHATML, ChatOptions(template_args={"tokenize": False}), "tokenize"),
        (CHATML, ChatOptions(template_args={"messages": []}), "template_args has .messages."),
    ],
)
def test_refusals_are_one_line(template: str, options: ChatOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        byte_level(ROLES, template=template).encode_chat([USER], options)
    assert "\n" not in str(caught.value)


def test_a_broken_template_is_the_file_s_fault() -> None:
    with pytest.raises(ModelFileError, match="template is broken"):
        byte_level(template="{% for %}").encode_chat([USER])


def test_several_templates() -> None:
    tokenizer = byte_level((*ROLES, "<bos>"), template=None)
    tokenizer._hf.chat_template = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    assert tokenizer.decode(tokenizer.encode_chat([USER], ChatOptions(tools=TOOLS))).startswith("[{")
    assert tokenizer.decode(tokenizer.encode_chat([USER])).startswith("user")


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (CHATML, ["<eos>", "<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "\\n<|im_end|>"), ["<eos>", "<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "<|im_end|>\\n<eos>"), ["<eos>", "<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "<|im_end|>response"), ["<eos>"]),
        (CHATML.replace("<|im_end|>", "<|end|>"), ["<eos>"]),  # which ends thinking in the same format
        (CHATML.replace("<|im_end|>", "###"), ["<eos>"]),
        (CHATML.replace("<|im_end|>", "."), ["<eos>"]),
        ("{{ raise_exception('never') }}", ["<eos>"]),
        ("{% for %}", ["<eos>"]),
        ("nothing of it", ["<eos>"]),
        (None, ["<eos>"]),
    ],
)
def test_the_token_that_ends_an_answer_in_the_template_ends_a_generation(
    template: str | None, added: list[str]
) -> None:
    tokenizer = byte_level((*ROLES, *Channels().tokens), template=template)
    assert tokenizer.eos_token_ids == set(tokenizer._hf.convert_tokens_to_ids(added))
