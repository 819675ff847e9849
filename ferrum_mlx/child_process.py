"""A child process with a socket to it, and what is known of one that has died.

The child is a fresh interpreter in a process group of its own, so that a terminal's Ctrl+C is the
parent's to decide. What it writes goes to a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import IO

_LOG_TAIL = 4096  # bytes of the child's output that are searched for its last line


def launch(main: str) -> tuple[subprocess.Popen[bytes], Connection, IO[bytes]]:
    """Start a child; returns it, our end of the socket to it, and the file of what it writes.

    Args:
        main: "module:function" of what it runs; its end of the socket is its only argument.

    Raises:
        OSError: nothing was started, and nothing is left open.
    """
    module, _, function = main.partition(":")
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:  # only the child keeps its end, so its death is our EOF
        undo.enter_context(ours)
        log = undo.enter_context(tempfile.TemporaryFile())
        start = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}()"
        process = subprocess.Popen(
            [sys.executable, "-c", start, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        undo.pop_all()
    return process, Connection(ours.detach()), log


def end(process: subprocess.Popen[bytes], patience: float, grace: float) -> None:
    """Wait for it, then ask it to end, then kill it; each gets so many seconds, the first `patience`."""
    for next_step in (process.terminate, process.kill):
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            next_step()
            patience = grace
    process.wait()


def how_it_ended(what: str, code: int) -> str:
    """In words; `what` names the process."""
    if code < 0:
        return f"{what} was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"{what} ended with exit code {code}"


def last_line(log: IO[bytes]) -> str:
    """What the child wrote last; "" if it was silent."""
    file = log.fileno()
    tail = os.pread(file, _LOG_TAIL, max(0, os.fstat(file).st_size - _LOG_TAIL))
    lines = tail.decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
