"""Renders chat templates in a child process, within limits of time and memory: see template_child.

One child serves all models of this process. One that is over a limit is killed, and the next rendering
starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe
from typing import Any

import psutil

from ferrum_mlx.errors import FerrumError, ModelFileError, UsageError, one_line
from ferrum_mlx.template_child import MEMORY

CPU_S = 5.0  # of computing, for one rendering; real ones take milliseconds
WALL_S = 60.0  # in all, on however slow a machine
_LOOK_S = 0.05  # how often a rendering that takes longer than this is looked at
_FORM = "messages are {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text}"
_OTHER = "use run --raw, or another model"


class _Child:
    """A running child and our ends of its pipes.

    Raises:
        OSError: none can be started.
    """

    def __init__(self) -> None:
        theirs_in, self.requests = Pipe(duplex=False)
        self.answers, theirs_out = Pipe(duplex=False)
        start = f"import sys; sys.path[:] = {sys.path!r}; from ferrum_mlx.template_child import main; main()"
        fds = [theirs_in.fileno(), theirs_out.fileno()]
        with theirs_in, theirs_out:  # only the child keeps its ends, so that its death is our EOF
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy comes along, and computes nothing
            )

    def end(self) -> int:
        """Its exit code; it is killed if it does not go by itself."""
        self.requests.close()
        self.answers.close()
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
_child: _Child | None = None


def start() -> None:
    """Start the child, so that it is ready when the first conversation is to be rendered."""
    with _lock:
        _ensure()


def render(**call: Any) -> str:
    """A conversation as text.

    Args:
        call: of transformers' `render_jinja_template`; values that JSON can say.

    Raises:
        UsageError: the template refuses the conversation.
        ModelFileError: the template is broken, or goes over a limit.
    """
    try:
        request = json.dumps({"cpu_s": CPU_S, "call": call}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the conversation holds what JSON cannot say: {one_line(error)}", _FORM) from error
    with _lock:
        kind, text = _exchange(_ensure(), request)
    if kind == "text":
        return text
    if kind == "refused":
        raise UsageError(f"the model's chat template refuses the conversation: {text}", _FORM)
    if kind == "syntax":
        raise ModelFileError(f"the model's chat template is broken: {text}", next_step=_OTHER)
    limit = {"memory": f"{MEMORY >> 20} MiB of memory", "time": f"{CPU_S:g} s of computing"}.get(kind, kind)
    raise ModelFileError(f"the model's chat template takes more than {limit}", next_step=_OTHER)


def _ensure() -> _Child:
    global _child
    if _child is None:
        try:
            _child = _Child()
        except OSError as error:
            raise FerrumError(f"cannot start the process of chat templates: {error}") from error
    return _child


def _exchange(child: _Child, request: bytes) -> tuple[str, str]:
    """What happened, and the text or reason that belongs to it."""
    try:
        child.requests.send_bytes(request)
        if over := _wait(child):
            _end()
            return over, ""
        kind, text = json.loads(child.answers.recv_bytes())
    except (EOFError, OSError) as error:
        code = _end()
        if code == -signal.SIGPROF:
            return "time", ""
        raise FerrumError(f"the process of chat templates ended with exit code {code}") from error
    except BaseException:  # Ctrl+C: an answer that nobody reads would be taken for that to the next request
        _end()
        raise
    return str(kind), str(text)


def _wait(child: _Child) -> str:
    """Wait for an answer, or the end; which limit it is over, if any."""
    deadline = time.monotonic() + WALL_S
    while not child.answers.poll(_LOOK_S):
        if time.monotonic() > deadline:
            return f"{WALL_S:g} s"
        with contextlib.suppress(psutil.Error):
            if psutil.Process(child.process.pid).memory_info().rss > 2 * MEMORY:
                return "memory"
    return ""


@atexit.register
def _end() -> int:
    global _child
    code = 0 if _child is None else _child.end()
    _child = None
    return code
