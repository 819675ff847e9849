"""`ferrum-mlx bench --watch`: the benchmark in a process of its own, on the screen while it runs.

The report is the child's, word for word: it runs what the command without --watch runs. A run begins when the
screen has been drawn. While it is measured, nothing here wakes but the terminal's reader, which looks for
keys ten times a second, and every other second a look at whether the terminal is still there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import click

from ferrum_mlx.bench.progress import Begun, Ended, Event, Reported, Said, Told
from ferrum_mlx.chat import settings as user_settings
from ferrum_mlx.child_process import end, how_it_ended, last_line, launch
from ferrum_mlx.cli import bench
from ferrum_mlx.cli.narrate import say, say_note
from ferrum_mlx.cli.screen import has_screen, pull_if_missing
from ferrum_mlx.errors import FerrumError, UsageError, shown

_MAIN = "ferrum_mlx.cli.watch:child"
_PATIENCE = 10.0  # seconds that a child has to leave, once it has nothing to tell any more
_GRACE = 1.0  # after SIGTERM
_DRAWING = 5.0  # seconds that a run waits for the screen at most: it may hang, or be stopped


def watch(asked: bench.Asked) -> int:
    """Show it, then print what the command prints; returns the exit code.

    Raises:
        UsageError: there is no terminal.
        FerrumError: as the command raises it; or the child died.
        KeyboardInterrupt: the user stopped it; what was measured until then is printed.
    """
    if not has_screen(sys.stdin, sys.stderr):
        raise UsageError(
            "--watch needs a terminal, and stdin or stderr is none (or TERM is dumb)",
            next_step="leave --watch away: what runs is then told on stderr, a line each",
        )
    pull_if_missing(asked.config)
    settings, notes = user_settings.load()
    for note in notes:
        say_note(note)
    from ferrum_tui.bench.app import WatchApp
    from ferrum_tui.terminal import follow_terminal

    follow_terminal()
    with Watched(asked) as child:
        app = WatchApp(child, settings.theme)
        app.run(mouse=False)  # a mouse that moves is worth no redraw; the terminal still selects and scrolls
        for note in app.notes:
            say_note(note)
        return app.return_code or child.finish()


class Watched:
    """A benchmark in a child process."""

    def __init__(self, asked: bench.Asked, main: str = _MAIN) -> None:
        try:
            self._process, self._pipe, self._log = launch(main)
        except OSError as error:
            raise FerrumError(
                f"the benchmark's process cannot be started: {error}", next_step="check disk space and TMPDIR"
            ) from error
        self._asked = asked
        self._report: str | None = None
        self._below: list[str] = []  # the report
        self._ended: Ended | None = None
        self._asked_to_stop = False
        self._killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """What it tells, up to its end, waiting for each; then `finish` may be called.

        A message that is broken is the end, too: where the next one begins is not known any more.
        """
        with contextlib.suppress(OSError):  # the child is gone
            self._pipe.send(self._asked)
        while True:
            try:
                event: Event = self._pipe.recv()
            except Exception:  # unpickling raises what it likes
                return
            self._keep(event)
            yield event

    def _keep(self, event: Event) -> None:
        match event:
            case Reported(text):
                self._report = text
            case Said(what) if self._report is not None:
                self._below.append(what)
            case Ended():
                self._ended = event

    def drawn(self, begun: Begun) -> None:
        """That run may go on: nothing is drawn any more."""
        with contextlib.suppress(OSError):  # the child is gone
            self._pipe.send(begun)

    def interrupt(self) -> None:
        """As Ctrl+C does where the command has the terminal: to it and to what it has started."""
        self._asked_to_stop = True
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:  # its number is its own until it has been waited for
            os.killpg(self._process.pid, number)

    def finish(self) -> int:
        """Print what the command prints; see `watch`."""
        end(self._process, _PATIENCE, _GRACE)
        if self._report is not None:
            click.echo(self._report)
        for what in self._below:
            say(what)
        if self._killed or (self._ended is None and self._asked_to_stop):  # so early that it could not say so
            raise KeyboardInterrupt
        if self._ended is None:
            raise self._obituary()
        if self._ended.error is not None:
            raise self._ended.error
        if self._ended.code == 130:
            raise KeyboardInterrupt
        return self._ended.code

    def _obituary(self) -> FerrumError:
        what = how_it_ended("the benchmark's process", self._process.returncode)
        last = last_line(self._log)
        return FerrumError(
            f"{what}, last saying {shown(last)}" if last else what,
            next_step="without --watch it tells more; if memory is short, take a smaller model or fewer --vs",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._log.close()


class _Parent:
    """What the child has of its parent: its end of the socket, and Ctrl+C.

    `interrupted` is the handler of SIGINT. A message goes out whole: Ctrl+C waits until it has. Where the
    exception gets lost, as in a destructor or an import that catches all, the next run does not begin.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = self._waiting = self._interrupted = False
        self._drawn: SimpleQueue[Begun] = SimpleQueue()

    def interrupted(self, *_: object) -> None:
        self._interrupted = True
        if not self._sending:
            raise KeyboardInterrupt
        self._waiting = True

    def asks(self) -> bench.Asked:
        asked: bench.Asked = self._pipe.recv()
        threading.Thread(target=self._listen, daemon=True).start()
        return asked

    def _listen(self) -> None:
        while True:
            try:
                self._drawn.put(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone: nobody is left to tell

    def send(self, event: Event) -> None:
        self._sending = True
        try:
            self._pipe.send(event)
        finally:
            self._sending = False
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def tell(self, event: Told) -> None:
        if isinstance(event, Begun) and self._interrupted:
            raise KeyboardInterrupt
        self.send(event)
        if isinstance(event, Begun):
            self._wait(event)

    def _wait(self, begun: Begun) -> None:
        """Until it is drawn. What comes late, of a run before, does not count."""
        until = time.monotonic() + _DRAWING
        with contextlib.suppress(Empty):
            while self._drawn.get(timeout=max(0.0, until - time.monotonic())) != begun:
                pass

    def narrate(self, what: str) -> None:
        say(what)  # into the log: the last words of a process that dies
        self.send(Said(what))

    def report(self, text: str) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is measured, and what follows not to be cut
        self.send(Reported(text))


def child() -> None:
    """The main function of the child; its argument is its end of the socket."""
    parent = _Parent(Connection(int(sys.argv[1])))
    try:
        signal.signal(signal.SIGINT, parent.interrupted)  # whatever the parent has made of it
        ended = Ended(1 if bench.run(parent.asks(), parent.narrate, parent.tell, parent.report) else 0)
    except KeyboardInterrupt:
        ended = Ended(130)
    except FerrumError as error:
        ended = Ended(error.exit_code, error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent.send(ended)
    if ended.code == 130:
        os._exit(0)  # see main: an interpreter that shuts down while an engine loads aborts
