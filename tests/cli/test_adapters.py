"""LoRA adapters on the command line and in the linear chat."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from ferrum_mlx.cli.options import chosen_adapter, named_folder
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import UsageError

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FAKE = ("--backend", "fake", "--max-tokens", "12")
ONE, TWO = ("--adapter", "a=."), ("--adapter", "a=.", "--adapter", "b=.")


def test_which_one_answers() -> None:
    none, one = EngineConfig(), EngineConfig(adapters=(("a", "."),))
    two = EngineConfig(adapters=(("a", "."), ("b", ".")))
    assert [chosen_adapter(config, None) for config in (none, one)] == ["", "a"]
    assert [chosen_adapter(two, name) for name in ("a", "b", "none")] == ["a", "b", ""]
    assert chosen_adapter(one, "none") == ""
    assert chosen_adapter(two, None, required=False) == ""
    with pytest.raises(UsageError, match="2 adapters are loaded, and none is chosen; allowed: a, b, none"):
        chosen_adapter(two, None)
    with pytest.raises(UsageError, match="the adapter is 'c'; allowed: a, b"):
        chosen_adapter(two, "c")


def test_a_folder_has_a_name() -> None:
    assert named_folder("a=x=y") == ("a", "x=y")
    with pytest.raises(click.BadParameter, match="allowed: NAME=FOLDER"):
        named_folder("folder")


def test_run_says_which_one_answered(ferrum: Run) -> None:
    done = ferrum("run", *FAKE, *TWO, "--use-adapter", "b", "--json", "hello")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["adapter"] == "b"
    assert "through the adapter b" in done.stderr


def test_a_wrong_one_is_told_in_a_line(refused: Refused) -> None:
    line = refused("run", *FAKE, "--adapter", "a=missing", "hello", code=2)
    assert "there is no folder 'missing' for the adapter 'a'" in line


def test_the_linear_chat_changes_adapters(ferrum: Run, tmp_path: Path) -> None:
    lines = ["/adapter", "hi", "/adapter b", "hi", "/adapter c", "/adapter none", "/model other", "/adapter"]
    done = ferrum("chat", *FAKE, *TWO, "--offline", "--events", "trace", stdin="\n".join(lines))
    assert done.returncode == 2
    for said in (
        "the adapter is none; allowed: a, b, none",
        "the adapter is b;",
        "the adapter is 'c'; allowed: a, b, or none at all",
        "the adapters are those of the model before, and stay behind",
        "no adapter is loaded; --adapter NAME=FOLDER loads one",
    ):
        assert said in done.stderr
    trace = map(json.loads, (tmp_path / "trace").read_text().splitlines())
    assert [line["adapter"] for line in trace if line["event"] == "queued"] == ["", "b"]


def test_the_only_one_answers_in_a_chat(ferrum: Run) -> None:
    done = ferrum("chat", *FAKE, *ONE, stdin="/adapter")
    assert "the adapter is a;" in done.stderr
