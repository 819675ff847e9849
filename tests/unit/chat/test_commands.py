"""What is a command, what is a text, and how both are completed."""

from __future__ import annotations

import pytest

from ferrum_mlx.chat.commands import (
    COMMANDS,
    as_text,
    complete,
    parse,
    session_id,
    thinking,
    walk,
    whole,
    words,
)
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.errors import UsageError


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [
        ("/new", "new", ""),
        (" /NEW \n", "new", ""),
        ("/edit  two\nlines ", "edit", "two\nlines"),
        ("/set temperature=0.7 top_k=4", "set", "temperature=0.7 top_k=4"),
        ("/rename\tMine", "rename", "Mine"),
    ],
)
def test_commands(text: str, name: str, argument: str) -> None:
    call = parse(text)
    assert call is not None
    assert (call.name, call.argument) == (name, argument)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("hello /new", "hello /new"),
        ("/usr/bin is", "/usr/bin is"),
        ("/etc/fstab", "/etc/fstab"),
        ("/ 2", "/ 2"),
        ("/2", "/2"),
        ("//new", "/new"),
        ("//tmp is // full", "/tmp is // full"),
        ("", ""),
    ],
)
def test_texts(text: str, sent: str) -> None:
    assert parse(text) is None
    assert as_text(text) == sent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/regne", "'/regne' is no command; did you mean /regen"),
        ("/xyzzy", "see /help"),
        ("/tmp is full", "// begins a text"),
        ("/new topic", "/new takes no argument, and has 'topic'"),
        ("/rename", "/rename needs an argument; allowed: /rename TITLE"),
        ("/think", "allowed: /think on|off|auto"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text)
    assert said in str(raised.value)


def test_completion_of_names_and_arguments() -> None:
    assert [c.text for c in complete("/")] == [f"/{c.name}{' ' * bool(c.arguments)}" for c in COMMANDS]
    assert [(c.text, c.label) for c in complete("/Re")] == [
        ("/regen", "/regen"),
        ("/resume ", "/resume [ID]"),
        ("/rename ", "/rename TITLE"),
    ]
    assert [c.text for c in complete("/think o")] == ["/think on", "/think off"]
    assert [c.text for c in complete("/set top_k=3 min_")] == [
        "/set top_k=3 min_p=",
        "/set top_k=3 min_tokens=",
    ]
    for name in ("model", "MODEL", "compare"):
        assert f"/{name} smollm2-135m" in [c.text for c in complete(f"/{name} smo")]
    assert [c.text for c in complete("/SET top_k=3 min_p")] == ["/SET top_k=3 min_p="]
    for text in ("", "hello", "//", "/new\n", "/rename x", "/think on now", "/xyz "):
        assert complete(text) == [], text


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("my file.md", "my file.md"),
        ('"my file.md"', "my file.md"),
        ("'my file.md'", "my file.md"),
        ("Bob's.md", "Bob's.md"),
        ('"half.md', '"half.md'),
        ('"', '"'),
        ("", ""),
    ],
)
def test_an_argument_that_is_one_name(argument: str, name: str) -> None:
    assert whole(argument) == name


def test_every_completed_name_is_a_command() -> None:
    for completion in complete("/"):
        try:
            assert parse(completion.text) is not None
        except UsageError as error:
            assert "needs an argument" in str(error)  # noqa: PT017


def test_arguments() -> None:
    assert words("""a 'b c' stop="x y" """) == ["a", "b c", "stop=x y"]
    with pytest.raises(UsageError, match="open quote"):
        words("don't")
    assert [thinking(word) for word in ("on", "OFF", "auto")] == [True, False, None]
    with pytest.raises(UsageError, match="allowed: on, off, auto"):
        thinking("maybe")
    assert session_id("12") == 12
    for wrong in ("x", "-1", "²", "9" * 30):
        with pytest.raises(UsageError, match="is no session"):
            session_id(wrong)


def test_walking_between_branches() -> None:
    talk = Conversation()
    for role, parent in (("user", None), ("assistant", 1), ("user", 2), ("assistant", 1), ("assistant", 3)):
        talk.add(role, parent=parent)  # 1 – (2 – 3 – 5, 4)
    assert walk(talk, 5, "next") == walk(talk, 5, "2") == 4
    assert walk(talk, 4, "prev") == walk(talk, 4, "1") == 5
    for leaf, argument in ((4, "next"), (5, "prev"), (5, "3"), (5, "0"), (5, "up")):
        with pytest.raises(UsageError, match="allowed: next, prev, 1 to 2"):
            walk(talk, leaf, argument)
    with pytest.raises(UsageError, match="no branches yet"):
        walk(talk, 1, "next")
