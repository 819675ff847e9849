"""The chat as it is measured: the real program on a pseudo-terminal, what its engine did, what it kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.store import Store

from .pseudo_terminal import PseudoTerminal

PROMPT = "Write a long story about a lighthouse keeper and the sea."
TOKENS = 160
HEAVY = ("mlx", "mlx_lm", "torch", "transformers")
_PATIENCE = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to PROMPT, and the engine's own count and speed."""

    text: str
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A chat that runs. `folder` has its settings, its sessions and its engine's records."""

    terminal: PseudoTerminal
    folder: Path

    @property
    def pid(self) -> int:
        return self.terminal.process.pid

    def records(self) -> list[Any]:
        return _records(self.folder)

    def wait_for_record(self, event: str) -> Any:
        while not (found := [record for record in self.records() if record["event"] == event]):
            self.terminal.read()
        return found[-1]

    def imported(self) -> set[str]:
        """The top-level names of what the screen's process has imported by now."""
        file = self.folder / "modules"
        file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _PATIENCE
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the program does not say what it has imported")
            self.terminal.read(0.01)
        return {name.partition(".")[0] for name in file.read_text().split()}

    def read_for(self, seconds: float) -> None:
        """A terminal that nobody reads would hold up who writes to it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.terminal.read(left)

    def idle(self, seconds: float) -> float:
        """Share of a core that the screen and its engine take with nothing to do."""
        self.read_for(1.0)
        before, began = self._cpu_seconds(), time.monotonic()
        self.read_for(seconds)
        return (self._cpu_seconds() - before) / (time.monotonic() - began)

    def answered(self) -> Answered:
        """End the chat; returns its one answer."""
        self.terminal.wait_for("tok/s · TTFT")  # the line below an answer that is whole
        record = self.wait_for_record("finished")
        self.terminal.send("\x11")  # Ctrl+Q
        self.terminal.end()
        store = Store(self.folder / "sessions.db")
        number = store.latest()
        assert number is not None
        answers = [each for each in store.load(number).messages.values() if each.role == "assistant"]
        store.close()
        return _answered(answers[-1].text, record)

    def _cpu_seconds(self) -> float:
        parent = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))


@contextmanager
def chat(threads: int, *options: str, turns: int = 0) -> Iterator[Trial]:
    """The screen; behind so many turns of a conversation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "ferrum_tui.probe",
            str(folder / "modules"),
            *_chat(folder),
            *options,
        ]
        if turns:
            _keep_long_conversation(folder, turns)
            command.append("--resume")
        with PseudoTerminal(command, _env(threads, folder), columns=120, rows=36) as terminal:
            yield Trial(terminal, folder)


def plain(threads: int, *options: str) -> Answered:
    """The answer without a screen."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "ferrum_mlx", *_chat(folder), *options, "--plain"]
        done = subprocess.run(
            command,
            input=PROMPT + "\n",
            text=True,
            env=_env(threads, folder),
            check=True,
            capture_output=True,
        )
        record = next(record for record in _records(folder) if record["event"] == "finished")
        return _answered(done.stdout.removesuffix("\n"), record)


def steps_after(records: list[Any], moment: float) -> int:
    """Forwards of the engine that ended after a moment, by time.time(); the one it was in is one of them."""
    steps = [record for record in records if record["event"] == "step" and record["time"] > moment]
    return sum(step["stats"]["forward_s"] > 0 for step in steps)  # the step that ends a request may have none


def _answered(text: str, record: Any) -> Answered:
    stats = record["stats"]
    return Answered(text, stats["usage"]["completion_tokens"], float(stats["timings"]["decode_tps"]))


def _records(folder: Path) -> list[Any]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _keep_long_conversation(folder: Path, turns: int) -> None:
    conversation, leaf = Conversation(title="long"), None
    for turn in range(turns):
        leaf = conversation.add("user", f"Question {turn}?", parent=leaf).id
        leaf = conversation.add(
            "assistant", f"- one\n- two\n\n```py\nx = {turn}\n```\n\n" * 5, parent=leaf
        ).id
    conversation.leaf = leaf
    store = Store(folder / "sessions.db")
    store.keep(conversation)
    store.close()


def _chat(folder: Path) -> list[str]:
    events = str(folder / "events.jsonl")
    return ["chat", "--temperature", "0", "--max-tokens", str(TOKENS), "--offline", "--events", events]


def _env(threads: int, folder: Path) -> dict[str, str]:
    own = {"FERRUM_DATA": str(folder), "FERRUM_CONFIG": str(folder / "config.toml")}
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **own, **dict.fromkeys(names, str(threads))}
