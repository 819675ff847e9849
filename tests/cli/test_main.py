"""Exit codes, and errors as one line."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import click
import pytest

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.cli import main, narrate

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]


def test_help_names_every_command(ferrum: Run) -> None:
    done = ferrum("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in main._COMMANDS)


def test_no_command_is_help_and_wrong_usage(ferrum: Run) -> None:
    done = ferrum()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


@pytest.mark.parametrize("name", main._COMMANDS)
def test_every_command_is_there_and_says_the_same_of_itself(name: str) -> None:
    module, _, attribute = main._COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name


def test_version(ferrum: Run) -> None:
    assert ferrum("--version").stdout.startswith("ferrum-mlx, version ")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["nonsense"], ["nonsense", "ferrum-mlx --help"]),
        (["run", "--nonsense"], ["--nonsense", "run --help"]),
        (["run", "--backend", "cuda", "hi"], ["cuda", "auto", "mlx"]),
        (["run", "--max-tokens", "many", "hi"], ["--max-tokens", "many"]),
        (["run", "--kv-memory", "3XB", "hi"], ["--kv-memory", "3XB", "512MB"]),
    ],
)
def test_wrong_usage_is_one_line_and_2(refused: Refused, args: list[str], parts: list[str]) -> None:
    line = refused(*args, code=2)
    assert all(part in line for part in parts)


@pytest.mark.parametrize("option", ["--max-tokens=", "--backend=", "--kv-memory=", "--model=", "--x"])
def test_a_long_value_does_not_flood_the_line(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run(["run", "--offline", f"{option}{'x' * 100_000}", "hi"]) in (1, 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ferrum-mlx: ")
    assert "xxx" in last
    assert len(last) < 700


def test_unexpected_error_is_one_line_and_tells_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("of\nall things")

    monkeypatch.setattr(main.cli, "main", broken)
    monkeypatch.delenv("FERRUM_DEBUG", raising=False)
    assert main._run([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "ferrum-mlx: an unexpected error, ValueError: of all things; set FERRUM_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("FERRUM_DEBUG", "1")
    with pytest.raises(ValueError, match="all things"):
        main._run([])


def test_control_codes_of_a_model_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main._fail("the chat template refuses: \x1b]0;owned\x07\x9b2J", 1)
    narrate.say("note: \x1b[2Jgone")
    assert capsys.readouterr() == ("", "ferrum-mlx: the chat template refuses: ]0;owned2J\nnote: [2Jgone\n")


def test_debug_shows_the_traceback(ferrum: Run) -> None:
    done = ferrum("run", "--max-tokens", "0", "hi", FERRUM_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_ctrl_c_is_130_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrum_mlx", "run", "--backend", "fake", "--max-model-len", "500000", "go"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_ctrl_c_while_the_model_loads_is_130_and_no_abort(smollm2: ResolvedModel) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrum_mlx", "run", "--model", str(smollm2.path), "go"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "reading the weights" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, "")


def test_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrum_mlx", "run", "--backend", "fake", "--max-model-len", "500000", "go"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    err = process.stderr.read()
    process.stderr.close()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "ferrum-mlx:" not in err


@pytest.mark.parametrize("redirect", ["<&-", ">/dev/full", "--json >/dev/full", ">&-"])
def test_closed_and_full_streams_are_no_unexpected_errors(redirect: str) -> None:
    prompt = "" if redirect == "<&-" else "hi"
    command = f"{sys.executable} -m ferrum_mlx run --backend fake --max-tokens 4 {prompt} {redirect}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=buffered)
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr
    if "full" in redirect:
        assert done.returncode == 1
        assert "cannot write the output: No space left on device" in done.stderr


def test_a_group_without_a_command_shows_its_help() -> None:
    done = subprocess.run([sys.executable, "-m", "ferrum_mlx", "models"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Commands:\n" in done.stderr
