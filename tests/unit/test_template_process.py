"""Chat templates that mean harm: a clear error within limits, and the next conversation is rendered."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest

from ferrum_mlx import template_process
from ferrum_mlx.errors import FerrumError, ModelFileError, UsageError

from .tiny_tokenizers import byte_level

ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TIME, MEMORY, REFUSED = "more than 0.3 s of computing", "MiB of memory", "refuses the conversation"


def render(template: str, content: object = "hi", **variables: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return template_process.render(conversations=[messages], chat_template=template, **variables)


@pytest.mark.parametrize(
    ("template", "kind", "said"),
    [
        (ENDLESS, ModelFileError, TIME),
        (CALLS, ModelFileError, TIME),
        ("{{ 7 ** (10 ** 8) }}", ModelFileError, TIME),  # one operation, which no exception can interrupt
        ("{{ 'a' * 10 ** 12 }}", ModelFileError, MEMORY),
        ("{{ '%1000000000d' % 1 }}", ModelFileError, MEMORY),
        ("{{ ['a' * 10 ** 6] * 10 ** 6 | join('') }}", UsageError, REFUSED),
        (DOUBLING, ModelFileError, f"{MEMORY}|{TIME}"),  # whichever a busy machine meets first
        ("{% for i in range(10 ** 12) %}x{% endfor %}", UsageError, "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", UsageError, "recursion"),
        ("{{ " + "(" * 100_000, UsageError, "recursion"),
        ("{{ ''.__class__.__mro__ }}", UsageError, "unsafe"),
        ("{{ messages.clear() }}", UsageError, "not safely callable|unsafe"),
        ("{% include '/etc/passwd' %}", UsageError, REFUSED),
    ],
)
def test_a_template_that_means_harm(
    template: str, kind: type[FerrumError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0.3)
    with pytest.raises(kind, match=said) as caught:
        render(template)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2500
    monkeypatch.undo()
    assert render("{{ messages[0].content }}") == "hi"


def test_memory_is_watched_where_the_system_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS; the child's own limit is larger than what is watched for here."""
    monkeypatch.setattr(template_process, "MEMORY", 1 << 20)
    with pytest.raises(ModelFileError, match="1 MiB of memory"):
        render(ENDLESS)
    monkeypatch.undo()
    assert render("x") == "x"


def test_a_machine_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "WALL_S", 0.1)
    with pytest.raises(ModelFileError, match=r"more than 0\.1 s"):
        render(ENDLESS)


def test_a_model_with_a_harmful_template_loads_and_cannot_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0.3)
    tokenizer = byte_level(template=ENDLESS)
    assert tokenizer.encode("hi")
    with pytest.raises(ModelFileError, match="use run --raw"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_what_json_cannot_say() -> None:
    with pytest.raises(UsageError, match="JSON cannot say"):
        render("x", content=object())


def test_several_threads_get_their_own_answers() -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        found[number] = "".join(render("{{ messages[0].content }}", f"{number} ") for _ in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number} " * 20 for number in range(4)}


def test_the_child_ends_with_its_parent() -> None:
    program = (
        "from ferrum_mlx import template_process as t; t.start(); print(t._child.process.pid, flush=True);"
        "import os, sys; t.render(conversations=[[{'role': 'user', 'content': ''}]], chat_template='x');"
        "os._exit(0) if sys.argv[1] == 'killed' else None"
    )
    for how in ("killed", "ended"):
        command = [sys.executable, "-W", "error", "-c", program, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        assert done.stderr == ""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(done.stdout)).wait(20)


def test_a_child_that_died_is_said_and_replaced() -> None:
    template_process.start()
    child = template_process._child
    assert child is not None
    child.process.kill()
    with pytest.raises(FerrumError, match="ended with exit code -9"):
        render("x")
    assert render("x") == "x"
    gc.collect()  # no pipe is left open: that would be a warning
