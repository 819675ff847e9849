"""A process that has imported what a pull needs, and forks for each: interpreters take seconds to start."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Behind a program's own lines, which define pull(argument).
_LOOP = """
import os, sys
for line in sys.stdin:
    command, _, argument = line.strip().partition(" ")
    if command == "wait":
        print(os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1]), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        code = 1
        try:
            pull(argument)
            code = 0
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
"""


class Nursery:
    """A process whose children pull.

    Args:
        program: defines pull(argument).
        log: the file of what they say.
    """

    def __init__(self, program: str, log: Path, *arguments: str) -> None:
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program + _LOOP, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )

    def pull(self, argument: str = "") -> int:
        """Begin one; returns its pid."""
        return self._ask(f"pull {argument}")

    def wait(self, pid: int) -> int:
        """Its exit code."""
        return self._ask(f"wait {pid}")

    def killed(self, times: int, argument: str = "", *, seed: int, longest: float) -> Iterator[int]:
        """Pulls that are killed at random moments, until so many were; the exit code of each.

        Args:
            longest: seconds until one is killed.
        """
        moments = random.Random(seed)
        while times:
            pid = self.pull(argument)
            time.sleep(moments.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
            code = self.wait(pid)
            assert code in (0, -signal.SIGKILL), self.log.read_text()
            times -= code != 0
            yield code

    def _ask(self, command: str) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())
