"""The child process in which chat templates run: transformers' sandbox, and limits that hold around it.

A template is a program of whoever made the model. Jinja's sandbox keeps it from files and from the
interpreter, but not from running for ever or from asking for all memory in one operation; the operating
system does that.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import psutil

MEMORY = 512 << 20  # bytes a rendering may take; the longest conversations take a few megabytes
MAX_TEXT = 64 << 20  # characters of a rendered conversation


def main() -> None:
    """Answer requests until the parent is gone; the arguments are the ends of two pipes.

    A request is {"cpu_s": limit, "call": arguments of transformers' render_jinja_template}, the answer
    [what happened, text]: "text", or "syntax", "memory" or "refused" with a reason.
    """
    requests = Connection(int(sys.argv[1]), writable=False)
    answers = Connection(int(sys.argv[2]), readable=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the parent's
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, also inside one long operation
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(requests.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            answer = json.dumps(_answer(render_jinja_template, request["call"])).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.send_bytes(answer)


def _answer(render: Any, call: dict[str, Any]) -> tuple[str, str]:
    from jinja2 import TemplateSyntaxError

    try:
        text = str(render(**call)[0][0])
    except TemplateSyntaxError as error:
        return "syntax", str(error)
    except MemoryError:
        return "memory", ""
    except Exception as error:  # a template raises what it likes
        return "refused", " ".join(str(error).split())[:2000] or type(error).__name__
    return ("text", text) if len(text) <= MAX_TEXT else ("memory", "")


def _limit_memory() -> None:
    """Only Linux keeps to it; elsewhere the parent watches."""
    most = psutil.Process().memory_info().vms + MEMORY
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
