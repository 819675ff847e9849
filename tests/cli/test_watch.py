"""`ferrum-mlx bench --watch`: the screen while it runs, then what the command prints without it."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from ferrum_mlx.bench.progress import Begun, Ended, Event, Kept, Planned, Reported, Said
from ferrum_mlx.chat.settings import settings_file
from ferrum_mlx.cli.bench import Asked
from ferrum_mlx.cli.watch import Watched, _Parent
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.messages import Ready
from ferrum_tui.pseudo_terminal import PseudoTerminal

FAKE = [sys.executable, "-m", "ferrum_mlx", "bench", "--backend", "fake", "--pp", "32", "--tg", "4"]
ASKED = Asked(
    *(EngineConfig(backend="fake"), (32,), (4,), (0,), (1,), (), (), 1, 0),
    *("json", "", ""),
)


def test_the_screen_then_the_report_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    into = ["/bin/sh", "-c", 'out=$1; shift; exec "$@" > "$out"', "sh", str(out)]
    command = [*into, *FAKE, "--reps", "2", "--seed", "5", "--json", "--watch"]
    with PseudoTerminal(command, columns=118, rows=30) as terminal:
        terminal.wait_for("╭" + "─" * 116 + "╮")  # the terminal's size; stdout has none
        terminal.wait_for("2 repetitions  seed 5")
        terminal.wait_for("greedy ids = the model's own forward")
        assert terminal.end() == 0
    last = terminal.text[terminal.text.rindex("╭") :]
    assert last.startswith("╭" + "─" * 116 + "╮")  # whatever it was drawn at before it knew the size
    assert terminal.output.count("\x1b[?1049h") == terminal.output.count("\x1b[?1049l") == 1
    told = json.loads(out.read_text())
    assert (told["complete"], told["settings"]) == (True, {"reps": 2, "seed": 5})
    assert [(line["test"], line["figures"]["peak_memory_bytes"]["n"]) for line in told["results"]] == [
        ("pp32", 2),
        ("tg4", 2),
    ]


def test_q_ends_with_the_report_of_what_there_is() -> None:
    settings = settings_file()
    settings.parent.mkdir()
    settings.write_text('theme = "rust"')
    with PseudoTerminal([*FAKE, "--reps", "100000", "--watch"]) as terminal:
        terminal.wait_for("3 of 100000")
        terminal.send("q")
        assert terminal.end() == 130
    screen, _, after = terminal.output.rpartition("\x1b[?1049l")
    assert "note: the settings name 'rust', which is no theme; allowed: " in after
    assert "interrupted: what was measured until then" in after
    assert "| tg4  | ferrum-mlx" in after
    assert "| tg4" not in screen
    assert "Traceback" not in terminal.output


@pytest.mark.slow
def test_a_benchmark_that_is_killed_leaves_one_line() -> None:
    with PseudoTerminal([*FAKE, "--reps", "100000", "--watch"], columns=300) as terminal:
        terminal.wait_for("3 of 100000")
        (child,) = psutil.Process(terminal.process.pid).children()
        child.send_signal(signal.SIGKILL)
        assert terminal.end() == 1
    after = terminal.output.rpartition("\x1b[?1049l")[2]
    assert "ferrum-mlx: the benchmark's process was killed by signal 9" in after
    assert "last saying '" in after
    assert "Traceback" not in terminal.output


@pytest.mark.slow
def test_a_terminal_that_goes_away_ends_the_benchmark() -> None:
    terminal = PseudoTerminal([*FAKE, "--reps", "100000", "--watch"])
    terminal.wait_for("3 of 100000")
    (child,) = psutil.Process(terminal.process.pid).children()
    os.close(terminal.master)
    terminal.process.wait(30)
    assert psutil.wait_procs([child], timeout=30)[1] == []


Make = Callable[..., Watched]
OPENING = "pipe = Connection(int(sys.argv[1]))\nasked = pipe.recv()\n"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a benchmark of the lines of a function, which has `pipe` and `asked` by then, or `opening`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Watched] = []

    def make(lines: str, opening: str = OPENING) -> Watched:
        (tmp_path / "a_child.py").write_text(
            "import os, signal, sys, time\n"
            "from multiprocessing.connection import Connection\n"
            "def main():\n" + textwrap.indent(opening + textwrap.dedent(lines), "    ")
        )
        made.append(Watched(ASKED, "a_child:main"))
        return made[-1]

    yield make
    for watched in made:
        watched.__exit__(None, None, None)


def test_events_come_as_they_were_told_and_the_command_s_words_after_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events: list[Event] = []
    with Watched(ASKED) as watched:
        for event in watched.events():
            events.append(event)
            if isinstance(event, Begun):
                watched.drawn(replace(event, rep=event.rep + 1))  # as one that comes late, of another run
                assert not watched._pipe.poll(0.1)  # a run of the fake takes less, if it does not wait
                watched.drawn(event)
        assert watched.finish() == 0
    kinds = [type(event) for event in events if not isinstance(event, Said)]
    assert kinds[:2] == [Ready, Planned]
    assert kinds[-6:] == [Begun, Kept, Begun, Kept, Reported, Ended]
    printed = capsys.readouterr()
    assert {line["test"] for line in json.loads(printed.out)["results"]} == {"pp32", "tg4"}
    assert printed.err == ""  # narration was for the screen


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "print('no memory is left'); sys.stdout.flush(); os.kill(os.getpid(), 9)",
            "signal 9 (Killed), last",
        ),
        ("raise ValueError('x')", "ended with exit code 1, last saying 'ValueError: x'"),
        ("os._exit(0)", "ended with exit code 0; without --watch"),
    ],
)
def test_a_child_that_dies_is_one_error(child: Make, lines: str, said: str) -> None:
    watched = child(lines)
    assert list(watched.events()) == []
    with pytest.raises(FerrumError) as caught:
        watched.finish()
    assert said in str(caught.value)
    assert caught.value.exit_code == 1


def test_an_error_of_the_command_stays_what_it_is(child: Make) -> None:
    watched = child(
        """
        from ferrum_mlx.bench.progress import Ended
        from ferrum_mlx.errors import UsageError
        pipe.send(Ended(2, UsageError("a context of 64 tokens", "allowed: more")))
        """
    )
    list(watched.events())
    with pytest.raises(UsageError, match="a context of 64 tokens; allowed: more"):
        watched.finish()


def test_what_was_said_below_the_report_is_said_below_it(
    child: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = child(
        """
        from ferrum_mlx.bench.progress import Ended, Reported, Said
        for event in (Said("above"), Reported("the report"), Said("a fault\\x1b[1m"), Ended(1)):
            pipe.send(event)
        """
    )
    list(watched.events())
    assert watched.finish() == 1
    assert capsys.readouterr() == ("the report\n", "a fault[1m\n")


def test_one_that_does_not_stop_is_killed(child: Make) -> None:
    watched = child(
        """
        from ferrum_mlx.bench.progress import Said
        signal.signal(signal.SIGINT, lambda *_: pipe.send(Said("not now")))
        pipe.send(Said("ready"))
        while True:
            time.sleep(1)
        """
    )
    events = watched.events()
    assert next(events) == Said("ready")
    watched.interrupt()
    assert next(events) == Said("not now")
    watched.kill()
    assert list(events) == []
    with pytest.raises(KeyboardInterrupt):
        watched.finish()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.6, 1.5])
def test_an_interruption_is_one_however_early(delay: float) -> None:
    with Watched(replace(ASKED, reps=100000)) as watched:
        time.sleep(delay)
        watched.interrupt()
        list(watched.events())
        with pytest.raises(KeyboardInterrupt):
            watched.finish()


def test_an_interruption_that_gets_lost_ends_it_before_the_next_run() -> None:
    ours, theirs = Pipe()
    parent = _Parent(theirs)
    with pytest.raises(KeyboardInterrupt):
        parent.interrupted()  # where it was, nobody took notice
    parent.tell(Said("on"))
    with pytest.raises(KeyboardInterrupt):
        parent.tell(Begun(("test", 1, "system"), 0))
    theirs.close()
    assert ours.recv() == Said("on")
    with pytest.raises(EOFError):
        ours.recv()


@pytest.mark.parametrize("asked", [True, False])
def test_one_that_dies_of_sigint_was_interrupted_if_that_was_asked(child: Make, asked: bool) -> None:
    watched = child("while True: time.sleep(1)", "signal.signal(signal.SIGINT, signal.SIG_DFL)\n")
    if asked:
        watched.interrupt()
    else:
        watched._signal(signal.SIGINT)
    assert list(watched.events()) == []
    with pytest.raises(KeyboardInterrupt if asked else FerrumError) as caught:
        watched.finish()
    assert asked or "killed by signal 2" in str(caught.value)


def test_sigint_while_the_child_hears_what_is_asked(child: Make) -> None:
    watched = child(
        """
        class Interrupted(Connection):
            def recv(self):
                signal.raise_signal(signal.SIGINT)
                return super().recv()
        watch.Connection = Interrupted
        watch.child()
        """,
        "from ferrum_mlx.cli import watch\n",
    )
    assert list(watched.events()) == [Ended(130)]


def test_sigint_in_the_middle_of_a_message_leaves_it_whole(child: Make) -> None:
    watched = child(
        """
        class Interrupted(Connection):
            def _send(self, data):
                super()._send(data[:7])
                signal.raise_signal(signal.SIGINT)
                super()._send(data[7:])
        watch.Connection = Interrupted
        watch.child()
        """,
        "from ferrum_mlx.cli import watch\n",
    )
    first, *_, last = watched.events()
    assert (type(first), last) == (Ready, Ended(130))


@pytest.mark.parametrize("message", [b"broken", b"\x80broken", b"cos\nno_such_name\n."])
def test_a_broken_message_is_the_end(child: Make, message: bytes) -> None:
    watched = child(f"pipe.send_bytes({message!r}); pipe.send(0)")
    assert list(watched.events()) == []
